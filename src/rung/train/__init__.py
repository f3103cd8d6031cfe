"""One rank of a training run: the loop, checkpoints, metrics, heartbeat."""
