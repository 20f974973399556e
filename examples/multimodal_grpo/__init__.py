"""Multimodal GRPO on one machine: five processes, one node, and nothing but references between them.

       pictures                    batches of 32 images x 8 answers, by reference
    ┌───────────┐        ┌───────────┐        ┌──────────┐        ┌───────────┐
    │   main    │        │ rollout 0 ├───────►│  reward  ├───────►│  trainer  │
    │ node, bars│        │ rollout 1 │        │ no torch │        │   GRPO    │
    └─────┬─────┘        └──▲──┬─────┘        └──┬───────┘        └──┬──┬─────┘
          │                 └──┼─────────────────┼───────────────────┘  │      newest weights, by reference
    ══════╧════════════════════╧═════════════════╧══════════════════════╧══════
      the plane: 64 MiB of shared memory, the rest on disk; pixels stored once, read in place

Read `rollout`, `reward` and `trainer`: they are the job. `patches`, `digits`, `tokens`, `policy` and `grpo` are what it
computes; `crew` and `wires` run the processes; `watch` and `summary` show what happens.
"""
