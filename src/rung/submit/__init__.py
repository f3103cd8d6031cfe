"""`rung submit`: a task handed to a scheduler. `job` says what is to run, and one module for each scheduler how."""
