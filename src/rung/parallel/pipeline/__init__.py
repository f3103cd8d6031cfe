"""A model divided into stages, and the order in which a rank runs them."""
