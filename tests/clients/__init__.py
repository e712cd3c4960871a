"""Real clients and raw conversations that the tests hold with a server."""
