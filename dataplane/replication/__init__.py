"""The replication protocol of a partition, without I/O: each event is passed in with the time, and effects are
returned.

The protocol is PacificA (Lin, Yang, Zhang, Zhou: "PacificA: Replication in Log-Based Distributed Storage Systems",
Microsoft Research MSR-TR-2008-25). Start with `replica`. `configuration` and `messages` define the terms, `leader`
and `follower` are the two roles, and `lease` explains why two leaders never answer at the same time.
"""
