"""`dp`: one process with a replica of the model on each of its devices."""
