"""Partitions of streams and tables over hosts: what carries out the decisions of `dataplane.replication`.

From below: `members` and `channel` (who is there, and frames to them), `hosted` and `replicas` (the replicas of this
node: effects, timers, disks, the coordinator), `waiters` (requests that wait at a leader), `table` and `directory`
(which partitions a stream has), `router` and `consuming` (which of them a request is for), `columns` (what to do about
columns whose node is gone).
"""
