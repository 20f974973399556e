"""The job of `examples.multimodal_grpo` over three hosts: a node on each, one stream over all of them.

         host a                       host b                      host c
    ┌───────────────┐           ┌───────────────┐           ┌───────────────┐
    │  trainer      │           │               │           │               │
    │  rollout 0    │           │  rollout 1    │           │  reward       │
    │     node ═════╪═══════════╪════ node ═════╪═══════════╪════ node      │
    └───────────────┘  pixels   └───────────────┘  answers  └───────────────┘

Nobody names a host: rows are appended where they are made, and each stage is given rows of all. Pixels cross to host a
alone, once, since nobody else asks for them. The hosts are network namespaces of this machine, or a node each on its
loopback, or Ray nodes; with `--kill`, host b dies in the middle, with all that runs there.

Read `stages`: what the processes do, and what they do when a host dies, which is two lines. `machine` and `on_ray` are
the hosts, `job` runs the job on them, `view` shows it.
"""
