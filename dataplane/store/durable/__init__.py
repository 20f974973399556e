"""What a node keeps on disk for good, in one directory: who it is, its partitions' logs, its durable shards.

`directory` is the directory and who may use it, `database` the SQLite file there, `log` the log of one partition in it,
`notes` small values by name, `journal` the commits, and `shards` the files of columns.
"""
