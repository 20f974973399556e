"""Tables: rows by key, and a table's partition as a state machine. No I/O, no clock, no sockets."""
