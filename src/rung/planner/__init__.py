"""`rung plan`: which strategy, how much memory, how long, before anything runs."""
