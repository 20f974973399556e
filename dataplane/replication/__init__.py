"""One replica of one partition, without I/O: events go in with the time, effects come out.

The protocol is PacificA (Lin, Yang, Zhang, Zhou: "PacificA: Replication in Log-Based Distributed Storage Systems",
Microsoft Research MSR-TR-2008-25). Start with `replica`; `configuration` and `messages` are its words, `leader` and
`follower` its two roles, `lease` the reason why two leaders never answer at once.
"""
