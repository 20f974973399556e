"""The persistent state of a node, in one directory: its identity, its partitions' logs, its durable shards.

`directory` is the directory and its lock, `database` the SQLite file there, `log` the log of one partition in it,
`notes` small values by name, `journal` the commits, and `shards` the files of columns.
"""
