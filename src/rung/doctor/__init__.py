"""`rung doctor`: looks at an environment before a long run. Each check has a verdict, and a fix in one line."""
