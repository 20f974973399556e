"""Tables of a node outside a cluster, and what requests about tables have in common."""
