"""Midair under a real systemd: `make test-systemd`."""
