"""Jobs with planted faults, for `bench.diagnosis` and the tests: pipelines of real processes that sleep instead of
working."""
