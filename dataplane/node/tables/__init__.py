"""Tables: those of this node, and on several hosts the one home that each has."""
