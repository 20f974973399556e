"""One report of what the benchmarks wrote: `python -m bench.report`. Every figure in it is from a JSON file."""
