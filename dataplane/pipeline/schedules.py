"""Known plans: for models GPipe, 1F1B and interleaved 1F1B; for stages, each with its workers, first in first out.

They are the baselines of searched plans.

- GPipe: all forward passes, then all backward passes (arXiv 1811.06965).
- 1F1B: worker w of P begins with P - 1 - w forward passes, then alternates a forward and a backward pass
  (PipeDream-Flush, arXiv 2006.09503).
- Interleaved 1F1B: each of P workers has v chunks, w, w + P, ...; micro-batches go through a chunk in groups of P, and
  a worker begins with (P - 1 - w) * 2 + (v - 1) * P forward passes ("Efficient Large-Scale Language Model Training on
  GPU Clusters Using Megatron-LM", arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from dataplane.pipeline import programs
from dataplane.pipeline.cluster import Cluster
from dataplane.pipeline.events import Ints, play
from dataplane.pipeline.models import Model
from dataplane.pipeline.plans import Plan, plan_of
from dataplane.pipeline.stages import Lengths, Pipeline, Rows


def uniform(model: Model, chunks: int, body: tuple[int, int] | None = None) -> Ints:
    """The bounds of chunks with nearly equal numbers of layers.

    body: the layers that are counted, such as the decoder's (first, end); None: all. Those before go to the first
    chunk, and those after to the last. Raises ValueError with fewer layers than chunks.
    """
    first, end = body or (0, len(model.layers))
    if end - first < chunks:
        raise ValueError(f"{end - first} layers can not be {chunks} chunks")
    bounds = np.round(np.linspace(first, end, chunks + 1)).astype(np.int32)
    bounds[0], bounds[-1] = 0, len(model.layers)
    return bounds


def interleaved(
    model: Model, cluster: Cluster, micro_batches: int, chunks: int = 2, bounds: Sequence[int] | Ints | None = None
) -> Plan:
    """The plan of interleaved 1F1B with this many chunks a worker; with 1, of 1F1B. bounds: of all chunks; None: nearly
    equal numbers of layers.

    Raises ValueError for interleaved chunks if the micro-batches are no multiple of the workers.
    """
    workers = cluster.workers
    if chunks > 1 and micro_batches % workers:
        raise ValueError(f"{micro_batches} micro-batches are no multiple of {workers} workers")
    at = uniform(model, chunks * workers) if bounds is None else np.array(bounds)
    total, count = chunks * micro_batches, chunks * workers
    orders = []
    for w in range(workers):
        early = workers - 1 - w if chunks == 1 else (workers - 1 - w) * 2 + (chunks - 1) * workers
        early = total if chunks > 1 and micro_batches == workers else min(early, total)

        def forward(k: int, w: int = w) -> int:
            group, rest = divmod(k, workers * chunks)
            return (rest // workers * workers + w) * micro_batches + group * workers + rest % workers

        def backward(k: int, w: int = w) -> int:
            group, rest = divmod(k, workers * chunks)
            chunk = (chunks - 1 - rest // workers) * workers + w
            return (count + chunk) * micro_batches + group * workers + rest % workers

        if chunks == 1:
            ahead = [w * micro_batches + m for m in range(micro_batches)]
            back = [(count + w) * micro_batches + m for m in range(micro_batches)]
        else:
            ahead, back = [forward(k) for k in range(total)], [backward(k) for k in range(total)]
        order = ahead[:early]
        for k in range(early, total):
            order += [ahead[k], back[k - early]]
        orders.append(order + back[total - early :])
    instructions = programs.of_chunks(count, micro_batches, split=False)
    name = "1F1B" if chunks == 1 else f"interleaved 1F1B, {chunks} chunks a worker"
    return plan_of(cluster, instructions, orders, bounds=tuple(int(b) for b in at), schedule=name)


def gpipe(model: Model, cluster: Cluster, micro_batches: int, bounds: Sequence[int] | Ints | None = None) -> Plan:
    """The plan of GPipe: all forward passes, then all backward passes."""
    workers = cluster.workers
    at = uniform(model, workers) if bounds is None else np.array(bounds)
    orders = [
        [(w + p * workers) * micro_batches + m for p in range(2) for m in range(micro_batches)] for w in range(workers)
    ]
    instructions = programs.of_chunks(workers, micro_batches, split=False)
    return plan_of(cluster, instructions, orders, bounds=tuple(int(b) for b in at), schedule="GPipe")


def fifo(
    pipeline: Pipeline,
    rows: Rows,
    cluster: Cluster,
    members: Mapping[str, Sequence[int]],
    parts: Sequence[Sequence[int] | Lengths],
) -> Plan:
    """The plan of stages whose workers (`members`, by stage) get the micro-batches (`parts`) in turn. A worker takes
    the first ready one.

    Raises ValueError if a stage has no worker, or a row is in no part.
    """
    count = len(parts)
    arrays = [np.array(part, np.int64) for part in parts]
    tasks = programs.stage_tasks(pipeline, rows, arrays, cluster.overhead_s)
    queues: list[list[int]] = []
    for s, stage in enumerate(pipeline.stages):
        workers = members.get(stage.name)
        if not workers:
            raise ValueError(f"{stage.name} has no worker")
        for m in range(count):
            tasks.queue[s * count + m] = len(queues)
            queues.append([workers[m % len(workers)]])
    tasks.key = np.tile(np.arange(count, dtype=np.float64), len(pipeline.stages))
    outcome = play(tasks, programs.room_of(cluster, queues))
    instructions = programs.of_stages(pipeline, count)
    return plan_of(
        cluster,
        instructions,
        outcome.order(),
        parts=tuple(tuple(map(int, p)) for p in arrays),
        schedule="first in, first out",
    )


def in_turn(rows: Rows, micro_batches: int) -> list[Lengths]:
    """The rows of each micro-batch: the groups in order, in nearly equal numbers."""
    groups = rows.groups
    cuts = np.round(np.linspace(0, len(groups), micro_batches + 1)).astype(int)
    return [np.concatenate(groups[a:b]) for a, b in pairwise(cuts) if b > a]
