"""Tables: rows by key, and the partition of a table as a state machine. No I/O, no clock, no sockets."""
