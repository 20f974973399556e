"""`python -m examples.multi_host`: run the job over three hosts, show it, and say what came of it."""

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
    """The exit code: 0 where the job learnt and the count of rows is exact, 1 where not, 130 after Ctrl-C."""
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
        print(f"no hosts of network namespaces: {why}.\nThree nodes on this machine's loopback instead (--loopback).")
        loopback = True
    return Machine(len(hosts.HOSTS), options.memory, loopback=loopback)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m examples.multi_host", description=__doc__.partition(": ")[2])
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--loopback", action="store_true", help="nodes on loopback, and no network namespaces")
    where.add_argument("--ray", action="store_true", help="on Ray: three Ray nodes on this machine")
    parser.add_argument("--ray-address", metavar="ADDRESS", help="with --ray: a cluster of three Ray nodes or more")
    parser.add_argument("--kill", action="store_true", help="kill two hosts, one after the other, and cut one off")
    parser.add_argument("--kill-at", type=int, default=KILL_AT, metavar="STEP", help="when that begins (%(default)s)")
    parser.add_argument("--memory", default="96MiB", help="each node's memory budget (%(default)s)")
    parser.add_argument("--target", type=float, default=0.8, help="mean reward to reach (%(default)s)")
    parser.add_argument("--steps", type=int, help="stop after so many updates")
    parser.add_argument("--seconds", type=float, default=240.0, help="stop after so long (%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
