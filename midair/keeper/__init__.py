"""The keeper: a second copy of every client's socket."""
