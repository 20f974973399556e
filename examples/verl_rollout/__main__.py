"""`python -m examples.verl_rollout`: run the steps, by reference or `--plain`, and say what they cost."""

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


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    usual = Job()
    parser = argparse.ArgumentParser("python -m examples.verl_rollout", description=__doc__.partition(": ")[2])
    parser.add_argument("--plain", action="store_true", help="DataProtos by value, as in verl alone")
    for name in ("prompts", "responses", "side", "steps"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name), help="(%(default)s)")
    parser.add_argument("--memory", default="256MiB", help="the plane's memory budget (%(default)s)")
    options = vars(parser.parse_args(arguments))
    memory = options.pop("memory")
    print(text(run(Job(**options), memory)))
    return 0


def run(job: Job, memory: str = "256MiB") -> Report:
    """Start Ray and, unless it is plain, the plane; run the job; end both."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init("local", num_cpus=job.cpus, include_dashboard=False, object_store_memory=256 << 20, log_to_driver=False)
    try:
        if not job.plain:
            nodes.up(dp.NodeConfig(memory=memory))
        return Trainer(job).run()
    finally:
        process.close()
        ray.shutdown()


def text(report: Report) -> str:
    """For people."""
    lines = []
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
