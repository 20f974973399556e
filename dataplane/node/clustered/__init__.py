"""Streams and tables of a cluster, for the clients of one node: each request goes to the leader of its partition.

The modules, bottom up: `open_streams`; `session` (the requests of one client to partitions, and repeated acks);
`append_merger` (merged appends); `retained_shards` and `column_holders` (columns that partitions need, here and on
other nodes); `streams`, `table_directory` and `tables`; `durable` (logs, and columns on disk); `single_node` (a node
with a data directory outside a cluster).
"""
