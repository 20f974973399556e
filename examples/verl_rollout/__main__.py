"""`python -m examples.verl_rollout`: run the steps by reference and by value, and print the costs of each."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

warnings.simplefilter("ignore")  # verl imports names of Ray's that are deprecated

import ray  # noqa: E402

import dataplane as dp  # noqa: E402
from dataplane.integrations import process  # noqa: E402
from dataplane.integrations import ray as nodes  # noqa: E402
from examples.verl_rollout.trainer import Job, Report, Trainer  # noqa: E402

ROOT = Path(__file__).parents[2]
WAYS = ("reference", "value")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a report for each way. Returns the exit code."""
    usual = Job()
    parser = argparse.ArgumentParser("python -m examples.verl_rollout", description=__doc__.partition(": ")[2])
    parser.add_argument("--only", choices=WAYS, help="run one way only; by value, as in verl alone")
    for name in ("prompts", "responses", "side", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name), help="(%(default)s)")
    parser.add_argument("--memory", default="256MiB", help="the plane's memory budget (%(default)s)")
    options = vars(parser.parse_args(arguments))
    memory, only = options.pop("memory"), options.pop("only")
    for way, report in run(Job(**options), memory, [only] if only else WAYS).items():
        print(text(way, report))
    return 0


def run(job: Job, memory: str = "256MiB", ways: Sequence[str] = WAYS) -> dict[str, Report]:
    """Run the job in each of these ways, with the same workers. Returns the reports by way. Ray is started and ended,
    unless it is initialised. memory: the plane's budget."""
    alone = not ray.is_initialized()
    if alone:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        store = {"object_store_memory": 256 << 20}
        ray.init("local", num_cpus=job.cpus, include_dashboard=False, log_to_driver=False, **store)
    try:
        if "reference" in ways:
            nodes.up(dp.NodeConfig(memory=memory))
        trainer = Trainer(job)
        try:
            return {way: trainer.run(plain=way == "value") for way in ways}
        finally:
            trainer.close()
    finally:
        process.close()
        nodes.down()
        if alone:
            ray.shutdown()


def text(way: str, report: Report) -> str:
    """The report as text."""
    lines = [f"by {way}"]
    for number, step in enumerate(report.steps, 1):
        lines.append(f"step {number}: reward {step['reward']:.2f}, loss {step['loss']:+.4f}")
    lines += [
        f"moving data              {report.moving_s:8.2f} s   (workers computed {report.computing_s:.2f} s)",
        f"through the controller   {report.passed / 1e6:8.2f} MB",
        f"stored in the plane      {report.stored / 1e6:8.2f} MB at most",
    ]
    lines += [f"peak of {name:<16} {peak / 1e6:8.0f} MB" for name, peak in report.peaks.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
