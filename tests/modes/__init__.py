"""Messaging modes."""
