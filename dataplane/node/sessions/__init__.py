"""The common part of the two ways to serve a client's requests, on one node (`node.local`) and in a cluster
(`node.clustered`): the interface of the streams, checks of requests, and columns that a client has staged."""
