"""The order of samples, their partition over ranks, and their collation into batches. Does not use models."""
