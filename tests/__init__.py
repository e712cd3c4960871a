"""Tests, in folders by room."""
