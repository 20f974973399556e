"""How far streams over many hosts go: `python -m bench.scale`."""
