"""Tables of a node that is in no cluster, and what clients ask of tables anywhere."""
