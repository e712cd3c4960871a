"""Messages through an instance: content, order, limits, pressure."""
