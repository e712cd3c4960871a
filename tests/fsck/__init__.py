"""Checks of shared memory."""
