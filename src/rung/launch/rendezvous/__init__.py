"""The rendezvous of launchers on several machines, by which they form each world of an elastic job."""
