"""The protocol: vectors, conversations, and other people's clients."""
