"""Measurements of Rung beside other ways to write the same training job."""
