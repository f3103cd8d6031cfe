"""`rung compare`: one job under several strategies, measured in fresh processes and told as figures."""
