"""A live page of a cluster: `dataplane web`, and `dataplane node --web`.

`looks` asks the nodes through one of them, `samples` makes rates and sums of two looks, `placement` finds failovers,
`history` keeps some minutes, `waits` says who waits for whom, `attention` what is slow or broken; `feed` does this
again and again, and `server` shows it to browsers, which can read it and change nothing.

It runs in a process of its own, so that nothing that viewers or strangers do takes time of a node.
"""
