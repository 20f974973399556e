"""The command `dataplane plan`: plans a model's layers or a pipeline's stages, and draws the plan next to the usual
one."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataplane.pipeline.cluster import Cluster
    from dataplane.pipeline.drawing import DrawnPlan
    from dataplane.pipeline.models import Model
    from dataplane.pipeline.plans import Plan
    from dataplane.pipeline.stages import Pipeline, Rows


def add_parser(commands: Any) -> None:
    """Add the command to those of `dataplane`."""
    parser = commands.add_parser("plan", help="plan a pipeline, and compare the plan with the usual schedule")
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a published model, such as gemma3_27b, or MODULE:NAME of a Model, or of a Pipeline and its Rows",
    )
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="number of workers (default: 8)")
    parser.add_argument("--per-host", type=int, metavar="N", help="workers on a host (default: all)")
    parser.add_argument(
        "--micro-batches",
        type=int,
        metavar="N",
        help="micro-batches in a step (default: 4 for each worker; chosen for a Pipeline of stages)",
    )
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens in a micro-batch (default: 4096)")
    parser.add_argument(
        "--chunks", type=int, default=2, metavar="N", help="chunks on a worker in the usual schedule (default: 2)"
    )
    parser.add_argument(
        "--worker-gb", type=float, metavar="GB", help="memory of a worker (default: what the usual schedule needs)"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, metavar="S", help="seconds to search for a plan (default: 5)"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a picture of the plan as SVG")
    parser.add_argument(
        "--width", type=int, default=100, metavar="N", help="width of the printed picture in characters (default: 100)"
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON, without a picture")
    parser.set_defaults(run=_run)


def _run(chosen: argparse.Namespace) -> int:
    from dataplane.pipeline import drawing  # these are not needed to show the help of other commands
    from dataplane.pipeline.cluster import Cluster
    from dataplane.pipeline.models import Model

    for name in ("workers", "per_host", "micro_batches", "tokens", "chunks", "width"):
        value = getattr(chosen, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} is 1 or more, not {value}")
    what = _resolved(chosen)
    cluster = Cluster.uniform(chosen.workers, chosen.per_host)
    shown = _of_model(what, cluster, chosen) if isinstance(what, Model) else _of_stages(*what, cluster, chosen)
    if chosen.svg is not None:
        chosen.svg.write_text(drawing.svg(shown))
    if chosen.json:
        print(json.dumps(_described(shown[0].plan, shown)))
        return 0
    print(drawing.text(shown, chosen.width))
    found = shown[0].plan
    step_s = shown[0].predicted.step_s
    ratio = shown[1].predicted.step_s / step_s if step_s else 1.0
    print(f"{ratio:.2f} x the usual plan's pace; {found.considered} plans considered in {found.planning_s:.1f} s")
    return 0


def _resolved(chosen: argparse.Namespace) -> Model | tuple[Pipeline, Rows]:
    from dataplane.pipeline import profiles
    from dataplane.pipeline.models import Model
    from dataplane.pipeline.stages import Pipeline, Rows

    if ":" not in chosen.what:
        return profiles.model(chosen.what, chosen.tokens)
    module, _, name = chosen.what.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{chosen.what}: {error}") from error
    finally:
        sys.path.pop(0)
    found = found() if callable(found) else found
    if isinstance(found, Model):
        return found
    match found:
        case (Pipeline() as pipeline, Rows() as rows):
            return pipeline, rows
    raise ValueError(f"{chosen.what} is no Model, and no Pipeline with its Rows")


def _of_model(model: Model, cluster: Cluster, chosen: argparse.Namespace) -> list[DrawnPlan]:
    from dataplane.pipeline import profiles
    from dataplane.pipeline.drawing import DrawnPlan
    from dataplane.pipeline.model_search import plan_model
    from dataplane.pipeline.schedules import interleaved, uniform

    count = chosen.micro_batches or 4 * cluster.workers
    first, end = profiles.body(chosen.what) if chosen.what in profiles.SIZES else (0, len(model.layers))
    fit = [c for c in range(1, chosen.chunks + 1) if c * cluster.workers <= end - first]
    if not fit:
        raise ValueError(f"{model.name} has {end - first} layers, and there are {cluster.workers} workers")
    chunks = fit[-1] if count % cluster.workers == 0 else 1
    usual = interleaved(model, cluster, count, chunks, uniform(model, chunks * cluster.workers, (first, end)))
    before = usual.predict(model)
    room = chosen.worker_gb * 1e9 if chosen.worker_gb else float(before.worker_bytes.max())
    bounded = replace(cluster, hosts=tuple(replace(host, worker_bytes=room) for host in cluster.hosts))
    found = plan_model(model, bounded, count, seconds=chosen.seconds)
    return [DrawnPlan("planned", found, found.predict(model)), DrawnPlan("usual", usual, before)]


def _of_stages(pipeline: Pipeline, rows: Rows, cluster: Cluster, chosen: argparse.Namespace) -> list[DrawnPlan]:
    from dataplane.pipeline.drawing import DrawnPlan
    from dataplane.pipeline.schedules import fifo, in_turn
    from dataplane.pipeline.search import plan

    names = tuple(stage.name for stage in pipeline.stages)
    count = chosen.micro_batches or min(len(rows.groups), cluster.workers)
    members = {name: [i % cluster.workers] for i, name in enumerate(names)}
    for w in range(len(names), cluster.workers):  # the rest are dealt out in turn
        at = w % len(names)
        replicas = pipeline.stages[at].replicas
        if replicas is None or len(members[names[at]]) < replicas:
            members[names[at]].append(w)
    usual = fifo(pipeline, rows, cluster, members, in_turn(rows, count))
    found = plan(pipeline, rows, cluster, seconds=chosen.seconds, micro_batches=chosen.micro_batches)
    return [
        DrawnPlan("planned", found, found.predict(pipeline, rows), names),
        DrawnPlan("usual", usual, usual.predict(pipeline, rows), names),
    ]


def _described(found: Plan, shown: list[DrawnPlan]) -> dict[str, Any]:
    return {
        "schedule": found.schedule,
        "step_s": shown[0].predicted.step_s,
        "usual_step_s": shown[1].predicted.step_s,
        "bound_s": found.bound_s,
        "bubble": shown[0].predicted.bubble,
        "bounds": found.bounds,
        "parts": found.parts,
        "workers_of": found.workers_of,
        "orders": found.orders,
        "worker_bytes": shown[0].predicted.worker_bytes.tolist(),
        "considered": found.considered,
        "planning_s": found.planning_s,
    }
