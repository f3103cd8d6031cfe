"""Reports why a rank failed or hangs, from its error, its stack and its log."""
