"""The job of `examples.multimodal_grpo` on three hosts: a node on each, and one stream over all of them.

         host a                       host b                      host c
    ┌───────────────┐           ┌───────────────┐           ┌───────────────┐
    │  trainer      │           │               │           │               │
    │  rollout 0    │           │  rollout 1    │           │  reward       │
    │     node ═════╪═══════════╪════ node ═════╪═══════════╪════ node      │
    └───────────────┘  pixels   └───────────────┘  answers  └───────────────┘

No stage names a host. Rows are appended where they are made, and each stage gets rows of all hosts. Only the trainer
reads pixels, so they cross to host a alone, once.

The hosts are network namespaces of this machine, nodes on its loopback, or Ray nodes. With `--kill`, a host is killed
and started again, twice, and host b is cut off for some seconds; on Ray, host b is killed.

Read `stages` first: the processes, and how they continue when a host dies. `machine` and `on_ray` are the hosts, `job`
runs the processes on them, and `view` shows their progress.
"""
