"""What a stream is: rows that wait for tasks, and which of them a task is given."""
