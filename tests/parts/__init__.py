"""Processes: each alone, and how they are started, upgraded, kept apart and restarted."""
