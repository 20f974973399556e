"""The process of a host that owns the store and answers the clients of that host."""
