"""Load generator, peers and the tables of ratios."""
