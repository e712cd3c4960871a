"""Fuzzers of what arrives on sockets: see README.md beside this file."""
