"""The manager of an instance (`midair up`) and the commands that talk to it."""
