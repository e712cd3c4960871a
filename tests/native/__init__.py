"""The C pieces alone."""
