"""The requests of one client of a node: about shards, and about the rows of streams and tables."""
