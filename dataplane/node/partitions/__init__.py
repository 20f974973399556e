"""Replicated partitions of streams and tables: the drivers around `dataplane.replication`.

The modules, bottom up: `channel` (frames to other nodes); `hosted` and `replicas` (the replicas of this node: effects,
timers, disks, the coordinator); `recruiter` (chooses followers); `waiters` (requests that wait at a leader); `record`,
`records` and `directory` (the partition of each stream and table); `router` (finds the leader); `column_releases`
(columns that no row needs, and columns of lost nodes); `unconfirmed_grants` (leases and permits granted to clients of
other nodes); `era` (ties a data directory to its coordinator); `partitions` (assembles these, and removes clients of
nodes that have ended).
"""
