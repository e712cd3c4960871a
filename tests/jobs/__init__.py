"""Reports about traces."""
