"""`rung submit`: submits a task to a scheduler. `job` describes the job, and each scheduler has its own modules."""
