"""Sequences divided over ranks: each has a part of the positions, and attention exchanges keys and values."""
