"""A whole run of `train_ppo_ray`, by its own command: `python loop_job.py reference|value PLAIN_OR_LAZY OPTIONS...`.

By reference it is started as users start it, `python -m dataplane.integrations.openrlhf`; by value as OpenRLHF says.
What needs CUDA is put in the place of OpenRLHF's own before: `loop_workers`.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import ray

_COMMANDS = {"reference": "dataplane.integrations.openrlhf", "value": "openrlhf.cli.train_ppo_ray"}
_MIB = 1 << 20


def main(way: str, agent: str, options: list[str]) -> None:
    runpy.run_path(str(Path(__file__).parents[1] / "ray_workers.py"))["use"]()
    ray.init(
        "local",
        num_cpus=8,
        num_gpus=8,
        include_dashboard=False,
        object_store_memory=256 * _MIB,
        log_to_driver=False,
        logging_level="warning",
    )
    import loop_workers as ours

    from examples.openrlhf_rollout.absent import stood_in

    with stood_in():
        import openrlhf.trainer.ray as groups
        import openrlhf.utils as utils
        from openrlhf.trainer.ray import launcher, ppo_actor, ppo_critic

        launcher.ReferenceModelActor = ray.remote(num_gpus=1)(ours.Reference)
        launcher.RewardModelActor = ray.remote(num_gpus=1)(ours.Reward)
        ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(ours.Policy)
        ppo_critic.CriticModelActor = ray.remote(num_gpus=1)(ours.Critic)
        ours.ppo_trainer.PPOTrainer = ray.remote(num_cpus=0)(ours.Trainer)
        ours.ppo_trainer_async.PPOTrainerAsync = ray.remote(num_cpus=0)(ours.AsyncTrainer)
        utils.get_strategy = ours.strategy_of
        groups.create_vllm_engines = lambda engines, *_, **__: _engines(engines, agent)
        sys.argv = ["train_ppo_ray", *options]
        try:
            runpy.run_module(_COMMANDS[way], run_name="__main__", alter_sys=True)
        finally:
            ray.shutdown()


def _engines(count: int, agent: str) -> list[Any]:
    import loop_workers as ours

    return [ray.remote(num_cpus=0)(ours.Engine).remote(agent) for _ in range(count)]


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
