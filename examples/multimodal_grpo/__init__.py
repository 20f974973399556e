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

With `--ranks 2` the trainer is two processes that train one policy (`ranks`). The rollout workers have different
speeds. One of them is killed during the job and started again. At the end, the trainer has counted each appended row
once.

Read `rollout`, `reward` and `trainer` first: they are the job. `patches`, `digits`, `tokens`, `policy` and `grpo` are
the model and its data. `ledger` counts rows. `crew` and `board` run the processes, and `watch` and `summary` show their
progress.
"""
