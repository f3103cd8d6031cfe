"""Layers divided over ranks: which, how, and the check that they compute the same."""
