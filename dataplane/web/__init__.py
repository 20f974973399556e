"""A live page of a cluster: `dataplane web`, and `dataplane node --web`.

`cluster_view` queries the nodes through one of them, `samples` computes rates and sums of two looks, `placement` finds
failovers, `history` keeps some minutes, `waits` names who waits for whom, `alerts` what is slow or broken; `feed`
does this repeatedly, and `server` shows it to browsers, which can read it and change nothing.

It runs in a process of its own, so that viewers take no time of a node.
"""
