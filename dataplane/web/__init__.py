"""A live page of a cluster: `dataplane web`, and `dataplane node --web`.

`cluster_view` queries the nodes through one of them. `samples` computes rates and sums from two queries, `placement`
finds failovers, `history` keeps the last minutes, `waits` finds which clients wait for which, and `alerts` finds slow
or broken parts. `feed` does this repeatedly, and `server` shows the results to browsers, which can change nothing.

The page runs in a process of its own, so that viewers take no time of a node.
"""
