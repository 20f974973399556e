"""The persistent state of a node, in one directory: its identity, its partitions' logs, its durable shards.

`directory` is the directory and its lock, `database` the SQLite file there, with its commits (`Journal`) and small
values by name (`Notes`), `log` the log of one partition in it, and `shards` the files of columns.
"""
