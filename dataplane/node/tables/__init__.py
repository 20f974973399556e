"""Tables of a node outside a cluster, and the common parts of requests about tables."""
