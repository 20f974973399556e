"""Makes one report of the benchmarks' results: `python -m bench.report`. Every figure in it comes from a JSON file."""
