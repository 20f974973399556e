"""The job of `examples.multimodal_grpo` on three hosts, with a node on each and one stream over all nodes.

         host a                       host b                      host c
    ┌───────────────┐           ┌───────────────┐           ┌───────────────┐
    │  trainer      │           │               │           │               │
    │  rollout 0    │           │  rollout 1    │           │  reward       │
    │     node ═════╪═══════════╪════ node ═════╪═══════════╪════ node      │
    └───────────────┘  pixels   └───────────────┘  answers  └───────────────┘

No stage names a host. Rows are appended on the host that makes them, and each stage consumes rows of all hosts. Only
the trainer reads pixels, so they are sent to host a alone, and once.

The hosts are network namespaces of this machine, nodes on its loopback, or Ray nodes. With `--kill`, a host is killed
and started again, twice, and then host b is cut off for some seconds. On Ray, host b is killed and stays dead.

Read `stages` first: the processes, and how they continue when another host dies. `machine` and `on_ray` are the hosts,
`job` runs the processes on them, and `view` shows their progress.
"""
