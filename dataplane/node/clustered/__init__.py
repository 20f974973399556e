"""Streams and tables over hosts as clients use them: what they ask goes to the leader of the partition.

From below: `streams` (the streams that are open on this node), `session` (one client's requests to partitions),
`retained` and `holders` (the columns here, and on other nodes, that partitions need), `acks`, `snapshots`, `restores`,
`client` (one client's messages, each answered by one of these), `service` (the streams as a whole); `table_directory`
(which tables there are), `tables` (what clients ask of them); `durable`, `alone` (what is on disk, also of one node).
"""
