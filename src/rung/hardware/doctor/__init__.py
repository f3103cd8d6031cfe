"""`rung doctor`: checks an environment before a long run. Each check gives a verdict and, if needed, a fix."""
