"""Partitions of streams and tables over hosts: what carries out the decisions of `dataplane.replication`.

From below: `channel` (frames to other nodes), `hosted` and `replicas` (the replicas of this node: effects, timers,
disks, the coordinator), `recruiting` (who follows), `waiters` (requests that wait at a leader), `record`, `records` and
`directory` (which partition a stream or table has), `router` (where its leader is), `columns` (what to do about columns
whose node is gone), `era` (which coordinator a data directory goes with), `service` (all).
"""
