"""What a batch is: columns, their bytes, references to them. Pure: no I/O, no sockets, no processes."""
