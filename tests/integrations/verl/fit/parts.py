"""What verl's model configuration imports in each process that has one (`actor_rollout_ref.model.external_lib`)."""

from __future__ import annotations

import os
import sys

from . import processor, rollout  # noqa: F401  # the processor registers itself

rollout.register()
if "FIT_TIMES" in os.environ:
    from bench import doors_fit_times

    doors_fit_times.wrap()
if "RANK" in os.environ and "verl.workers.engine_workers" in sys.modules:  # a trainer's rank
    from verl.utils.distributed import initialize_global_process_group_ray

    from . import engine  # noqa: F401  # registers itself

    initialize_global_process_group_ray(backend="cpu:gloo")  # verl would name the processor twice
