"""Multimodal GRPO on one machine: six processes, one node, and one stream of rows between them.

                      ┌───────────┐        ┌──────────┐        ┌───────────┐
       pictures       │ rollout 0 │ append │  reward  │        │  trainer  │
    ┌───────────┐     │ rollout 1 ├───┐    │ no torch │        │   GRPO    │
    │   main    │     │ rollout 2 │   │    └──▲────┬──┘        └──▲─────┬──┘
    │ node, bars│     └─────▲─────┘   │       │    │ extend       │     │
    └─────┬─────┘           └─────────┼───────┼────┼──────────────┼─────┘ newest weights, by reference
          │                           │    rows of 2 columns    complete groups of 8, with their reward
    ══════╧═══════════════════════════▼═══════╧════▼══════════════╧═════════════════════════════════════
      stream "rollouts", tasks "reward" and "actor", on 64 MiB of shared memory, the rest on disk

With `--ranks 2` the trainer is two processes, which learn together (`ranks`). The rollout workers are of different
speed, and in the middle one of them is killed and started again; at the end, the trainer has counted each row that was
appended once. Read `rollout`, `reward` and `trainer`: they are the job.
`patches`, `digits`, `tokens`, `policy` and `grpo` are what it computes; `ledger` counts; `crew` and `board` run the
processes; `watch` and `summary` show what happens.
"""
