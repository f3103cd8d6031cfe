"""The operating system: environment, network, processes, files, units. Standard library only."""
