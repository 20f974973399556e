"""Jobs with planted faults, for `bench.diagnosis` and the tests: pipelines of real processes whose work is sleep."""
