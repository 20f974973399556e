"""What earlier responses are worth: drafts, lengths, schedules. `python -m bench.history`."""
