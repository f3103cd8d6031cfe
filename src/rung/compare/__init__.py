"""`rung compare`: measures one job under several strategies, each in fresh processes."""
