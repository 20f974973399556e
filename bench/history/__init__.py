"""The benefit of earlier responses: drafts, predicted lengths, schedules. `python -m bench.history`."""
