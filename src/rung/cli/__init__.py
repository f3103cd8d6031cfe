"""The command line, one file per command. Commands import their implementation when called, so that `rung --help` and a
misspelt flag do not wait for torch to load."""
