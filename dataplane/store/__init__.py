"""Stores shards on a host: shared memory, the budget that bounds it, pins, and the disk behind it."""
