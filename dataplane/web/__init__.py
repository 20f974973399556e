"""A live page of a cluster: `dataplane web`, and `dataplane node --web`.

`cluster_view` queries the nodes through one of them, `samples` computes rates and sums of two looks, `placement` finds
failovers, `history` keeps some minutes, `waits` finds which clients wait for which, `alerts` finds slow or broken
parts; `feed` does this repeatedly, and `server` shows it to browsers, which can read it and change nothing.

It runs in a process of its own, so that viewers take no time of a node.
"""
