"""Batches: columns, their bytes, and references to them. Pure: no I/O, no sockets, no processes."""
