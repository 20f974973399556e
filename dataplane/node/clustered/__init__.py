"""Streams and tables over hosts as clients use them: what they ask goes to the leaders of the partitions that it
concerns.

From below: `streams` (the streams that are open on this node, and their partitions), `session` (one client's requests
to partitions), `retained` (the shards here that partitions need), `producer_router` (appends and extends, split by
partition), `search`, `grants` and `gather` (deliveries of one partition or of several), `candidates` (what samplers of
users are shown), `task_members` (what replicas are given), `snapshots`, `restores`, `service` (a client's messages,
each answered by one of these); `table_directory` (which tables there are), `tables` (what clients ask of them).
"""
