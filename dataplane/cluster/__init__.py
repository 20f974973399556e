"""The members of a cluster of hosts."""
