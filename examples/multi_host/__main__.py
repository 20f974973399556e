"""`python -m examples.multi_host`: run the job on three hosts, show its progress, and print a summary."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import dataplane as dp
from bench.namespaces import why_not
from examples.multi_host import job as hosts
from examples.multi_host.machine import Machine
from examples.multi_host.view import View
from examples.multimodal_grpo.job import Job

KILL_AT = 25


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code: 0 if the target is reached and the count of rows is exact, 1 if not, 130 after Ctrl-C."""
    options = _parser().parse_args(arguments)
    job = Job(pauses=(0.0, 0.0), target=options.target, steps=options.steps, seconds=options.seconds, averaged=10)
    view = View(job, hosts.HOSTS, sys.stdout)
    try:
        with _cluster(options) as cluster:
            hosts.run(job, cluster, view, kill_at=options.kill_at if options.kill else None)
    except KeyboardInterrupt:
        pass
    except (dp.DataplaneError, TimeoutError, RuntimeError) as error:
        view.say(f"the plane failed: {error}")
        return 1
    return view.summary()


def _cluster(options: argparse.Namespace) -> Any:
    os.environ.pop("DATAPLANE_ADDRESS", None)
    if options.ray:
        try:
            from examples.multi_host.on_ray import OnRay
        except ImportError:
            sys.exit("Ray is not installed: pip install 'rollout-dataplane[ray]'")
        return OnRay(len(hosts.HOSTS), options.memory, options.ray_address)
    loopback = options.loopback
    if not loopback and (why := why_not()):
        print(f"Without network namespaces: {why}.\nThe hosts are three nodes on this machine's loopback (--loopback).")
        loopback = True
    return Machine(len(hosts.HOSTS), options.memory, loopback=loopback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m examples.multi_host", description=__doc__.partition(": ")[2])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--loopback", action="store_true", help="nodes on loopback in place of network namespaces")
    where.add_argument("--ray", action="store_true", help="on Ray: three Ray nodes on this machine")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="with --ray: a cluster of at least three Ray nodes")
    parser.add_argument("--kill", action="store_true", help="kill two hosts and cut one off; on Ray, kill one")
    parser.add_argument(
        "--kill-at", type=int, default=KILL_AT, metavar="STEP", help="update at which --kill begins (%(default)s)"
    )
    parser.add_argument("--memory", default="96MiB", help="each node's memory budget (%(default)s)")
    parser.add_argument("--target", type=float, default=0.8, help="mean reward to reach (%(default)s)")
    parser.add_argument("--steps", type=int, help="stop after this number of updates")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after this time (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
