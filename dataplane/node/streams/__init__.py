"""Streams as one node has them: their homes, what its clients ask of them, and what homes ask and tell other nodes."""
