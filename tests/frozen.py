"""Freezes what is imported so far: the last of what a server of forks imports, so that no fork copies pages to collect
its garbage."""

import gc

gc.collect()
gc.freeze()
