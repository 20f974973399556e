"""Run the steps by reference and then by value, and print the costs of each: `python -m examples.openrlhf_rollout`."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray

import dataplane as dp
from dataplane.integrations import openrlhf as door
from dataplane.integrations import process

if TYPE_CHECKING:
    from examples.openrlhf_rollout.job import Report

MIB = 1 << 20
WAYS = ("reference", "value")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.openrlhf_rollout", description=__doc__)
    parser.add_argument("--only", choices=WAYS, help="run one way only; by value is without the plane")
    parser.add_argument("--prompts", type=int, default=8, help="prompts a step, each with a picture")
    parser.add_argument("--answers", type=int, default=8, help="answers a prompt")
    parser.add_argument("--side", type=int, default=224, help="width and height of a picture in pixels")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=1, help="workers that train the policy")
    options = parser.parse_args(arguments)
    ways = [options.only] if options.only else WAYS

    root = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(
        "local", num_cpus=4, num_gpus=4, include_dashboard=False, object_store_memory=512 * MIB, log_to_driver=False
    )
    try:
        from examples.openrlhf_rollout.job import Crew, Size  # OpenRLHF takes seconds to import

        if "reference" in ways:
            door.install(dp.NodeConfig(memory="512MiB", spill="1GiB"))
        size = Size(options.prompts, options.answers, options.side, options.steps, options.ranks)
        with tempfile.TemporaryDirectory() as where:
            crew = Crew(size, Path(where))
            for way in ways:
                if way == "value":
                    door.uninstall()
                show(way, crew.run(lazy=way == "reference"))
    finally:
        door.uninstall()
        process.close()
        ray.shutdown()


def show(way: str, report: Report) -> None:
    print(f"by {way}")
    for number, (loss, reward, seconds) in enumerate(zip(report.losses, report.rewards, report.step_s, strict=True)):
        print(f"  step {number}: loss {loss:+.6f}, reward {reward:.4f}, {seconds:.2f} s")
    put, got = report.moved_bytes["put"] / MIB, report.moved_bytes["got"] / MIB
    print(f"  the driver put {put:.2f} MiB into Ray and got {got:.2f} MiB from it, in {report.moving_s:.3f} s")
    for name, peak in report.peaks.items():
        print(f"  {name}: at most {peak / MIB:.0f} MiB more than before the first step")


if __name__ == "__main__":
    main()
