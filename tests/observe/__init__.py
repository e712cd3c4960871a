"""Looking at an instance: monitor, commands, traces."""
