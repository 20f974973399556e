"""Computes how many hosts one stream carries: `python -m bench.scale`."""
