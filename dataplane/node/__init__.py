"""A host's process: it owns the store and answers the clients of that host."""
