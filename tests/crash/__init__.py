"""Clients that check every promise while components are being killed."""
