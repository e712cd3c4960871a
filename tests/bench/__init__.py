"""The bench suite itself."""
