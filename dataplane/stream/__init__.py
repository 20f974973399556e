"""Streams: rows that wait for tasks, and the choice of the rows that a task is given."""
