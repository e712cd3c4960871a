"""Looking at an instance from outside: commands for people, HTTP for programs."""
