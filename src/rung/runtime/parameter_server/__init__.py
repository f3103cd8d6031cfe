"""Training over RPC: synchronous and asynchronous parameter servers, and modules on servers."""
