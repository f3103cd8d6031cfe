"""`rung bench`: micro-benchmarks. `rung bench collectives` is the only one so far."""
