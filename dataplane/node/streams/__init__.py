"""Streams as the clients of one node use them: of this node alone, or of the cluster."""
