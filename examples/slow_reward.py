"""The worked case of `docs/diagnosis.md`: a job with a slow reward function, diagnosed while it runs.

`python -m examples.slow_reward` prints the slow line. `--rewards 3` follows its advice and halves the time of a step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from contextlib import suppress

import dataplane as dp
from dataplane.diagnosis.command import as_text


def score(answers: int) -> list[float]:
    """Reward answers slowly."""
    time.sleep(0.15)
    return [1.0] * answers


def roll_out(address: str) -> None:
    """Append four rows every 80 ms."""
    with suppress(dp.Closed), dp.connect(address) as plane:
        rollouts = plane.stream("rollouts")
        while True:
            time.sleep(0.08)
            rollouts.append({"ids": [[1, 2, 3]] * 4})


def reward(address: str) -> None:
    """Add rewards to rows."""
    with suppress(dp.Closed), dp.connect(address) as plane:
        rollouts = plane.stream("rollouts")
        for delivery in rollouts.deliveries("reward", rows=4, columns=["ids"]):
            rollouts.extend(delivery.ref, {"reward": score(len(delivery.get()))})


def train(address: str) -> None:
    """Make a step for each four rows."""
    with suppress(dp.Closed), dp.connect(address) as plane:
        rollouts = plane.stream("rollouts")
        for delivery in rollouts.deliveries("trainer", rows=4, columns=["ids", "reward"]):
            delivery.get()
            time.sleep(0.06)


def main() -> None:
    """Run the job, and print its diagnosis. Raises SystemExit if a process ends early."""
    parser = argparse.ArgumentParser("python -m examples.slow_reward", description=__doc__)
    parser.add_argument("--rewards", type=int, default=1, help="reward processes (%(default)s)")
    parser.add_argument("--seconds", type=float, default=8.0, help="time of the diagnosis (%(default)s)")
    chosen = parser.parse_args()
    if chosen.rewards < 1:
        parser.error("--rewards: without one, no step is made")
    context = multiprocessing.get_context("spawn")
    with dp.connect(config=dp.NodeConfig(memory="64MiB", spill=0)) as plane:
        rollouts = plane.stream("rollouts", tasks=["reward", "trainer"], max_rows=64)
        roles = [train, *[reward] * chosen.rewards, roll_out, roll_out]
        processes = [
            context.Process(target=role, args=(plane.address,), name=role.__name__, daemon=True) for role in roles
        ]
        for process in processes:
            process.start()
        try:
            while rollouts.stats()["task"]["trainer"]["acked"] < 40:
                for process in processes:
                    if not process.is_alive():
                        raise SystemExit(f"{process.name} ended with exit code {process.exitcode}")
                time.sleep(0.1)
            time.sleep(1.5)
            print(as_text(plane.diagnose(chosen.seconds)))
        finally:
            rollouts.drop()
            for process in processes:
                process.join(5.0)
                process.kill()  # if it still runs
                process.join()


if __name__ == "__main__":
    main()
