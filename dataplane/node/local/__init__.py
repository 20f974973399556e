"""Streams and tables of a node outside a cluster. They end with its process."""
