"""Ranks, process groups, stores and RPC between processes, real or fake. Independent of tasks."""
