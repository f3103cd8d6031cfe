"""The user's input: task, settings, strategy, and checks that they are compatible. Imports no torch."""
