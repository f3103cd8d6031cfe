"""Expert parallelism: the experts of a layer shared out among ranks, and tokens sent to the ranks of their experts."""
