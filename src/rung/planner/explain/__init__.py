"""`rung explain`: what each rank holds, sends and computes under a strategy."""
