"""The instructions of a step and their simulated tasks, for stages over micro-batches and for chunks of a model.

Invariants: instruction i of n is task i of the first simulated step, and task i + n * k of the k-th step after it. A
stage's instruction is `stage * micro_batches + micro`; a chunk's is `(pass * chunks + chunk) * micro_batches + micro`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dataplane.pipeline.cluster import Cluster
from dataplane.pipeline.events import Floats, Ints, Room, Tasks
from dataplane.pipeline.models import Model
from dataplane.pipeline.stages import Lengths, Pipeline, Rows

RUN, FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = (
    "run",
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One unit of work of a worker: a stage, or a pass of a chunk, for one micro-batch."""

    kind: str
    stage: int
    micro: int
    #: The instructions of the step that must end before it begins.
    needs: tuple[int, ...]


Partition = Sequence[Lengths]
"""The rows of each micro-batch."""


def of_stages(pipeline: Pipeline, micro_batches: int) -> tuple[Instruction, ...]:
    """The instructions of a step of stages."""
    found = []
    for s, stage in enumerate(pipeline.stages):
        for m in range(micro_batches):
            micros = range(micro_batches) if stage.whole else (m,)
            needs = [p * micro_batches + n for p in pipeline.needs[s] for n in micros]
            if stage.ordered and m:
                needs.append(s * micro_batches + m - 1)
            found.append(Instruction(RUN, s, m, tuple(needs)))
    return tuple(found)


def stage_seconds(pipeline: Pipeline, rows: Rows, parts: Partition) -> Floats:
    """float64 `[stages, micro-batches]`: the seconds of each stage for each micro-batch."""
    return np.array([[s.cost.seconds(rows.tokens(s.cost.tokens)[part]) for part in parts] for s in pipeline.stages])


def stage_tasks(pipeline: Pipeline, rows: Rows, parts: Partition, overhead_s: float = 0.0, steps: int = 1) -> Tasks:
    """The tasks of several equal steps. The queue of each is its stage. The first stage takes a place of slot 0, and
    the last gives it back."""
    stages, count = pipeline.stages, len(parts)
    work = stage_seconds(pipeline, rows, parts) + overhead_s
    sizes = np.array(
        [[s.output_bytes * len(p) + s.token_bytes * rows.tokens(s.cost.tokens)[p].sum() for p in parts] for s in stages]
    )
    total = len(stages) * count
    shape = (pipeline.needs, tuple(s.whole for s in stages), tuple(s.ordered for s in stages), pipeline.last)
    pairs, at = _stage_edges(*shape, count, pipeline.lag, steps)
    reads = np.array([[bool(set(a.outputs) & set(b.inputs)) for b in stages] for a in stages])
    carried = reads[pairs[:, 0] % total // count, pairs[:, 1] % total // count] * sizes.ravel()[pairs[:, 0] % total]
    stage_of = np.tile(np.repeat(np.arange(len(stages)), count), steps)
    take = np.where(stage_of == 0, 1, np.where(stage_of == len(stages) - 1, -1, 0)) if len(stages) > 1 else 0 * stage_of
    none = np.zeros(total * steps)
    return Tasks(
        np.tile(work.ravel(), steps),
        np.array([stage.cost.cores for stage in stages])[stage_of],
        stage_of,
        none,
        np.where(take != 0, 0, -1),
        take,
        np.tile(sizes.ravel(), steps),
        none,
        none,
        at,
        pairs[:, 1],
        carried,
    )


@lru_cache(maxsize=64)
def _stage_edges(
    needs: tuple[tuple[int, ...], ...],
    whole: tuple[bool, ...],
    ordered: tuple[bool, ...],
    last: tuple[int, ...],
    count: int,
    lag: int,
    steps: int,
) -> tuple[Lengths, Lengths]:
    """The pairs of dependent tasks of all steps, int64 [pairs, 2], and the position of each task's first pair."""
    stages, total, micros = len(needs), len(needs) * count, np.arange(count)
    own = [np.zeros((0, 2), np.int64)]
    for s in range(stages):
        for p in needs[s]:
            firsts, seconds = (np.repeat(micros, count), np.tile(micros, count)) if whole[s] else (micros, micros)
            own.append(np.stack([p * count + firsts, s * count + seconds], axis=1))
        if ordered[s]:
            own.append(np.stack([s * count + micros[:-1], s * count + micros[1:]], axis=1))
    edges = np.concatenate(own)
    ends = np.concatenate([s * count + micros for s in last])
    begins = np.concatenate([s * count + micros for s in range(stages) if not needs[s]])
    between = np.stack([np.repeat(ends, len(begins)), np.tile(begins, len(ends)) + (1 + lag) * total], axis=1)
    every = [edges + step * total for step in range(steps)]
    every += [between + step * total for step in range(steps - 1 - lag)]
    pairs = np.concatenate(every)
    pairs = pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]
    return pairs, np.searchsorted(pairs[:, 0], np.arange(total * steps + 1))


def of_chunks(chunks: int, micro_batches: int, split: bool) -> tuple[Instruction, ...]:
    """The instructions of a step of chunks; `split`: the backward pass is two instructions."""
    count, shift = micro_batches, chunks * micro_batches
    found = [
        Instruction(FORWARD, c, m, ((c - 1) * count + m,) if c else ()) for c in range(chunks) for m in range(count)
    ]
    for c in range(chunks):
        for m in range(count):
            after = (shift + (c + 1) * count + m,) if c + 1 < chunks else ()
            found.append(Instruction(BACKWARD_INPUT if split else BACKWARD, c, m, (c * count + m, *after)))
    if split:
        found += [
            Instruction(BACKWARD_WEIGHT, c, m, (shift + c * count + m,)) for c in range(chunks) for m in range(count)
        ]
    return tuple(found)


@lru_cache(maxsize=64)
def _edges(chunks: int, micro_batches: int, split: bool) -> tuple[Ints, Ints, Ints]:
    """The position of each task's first dependency, the dependent tasks, and for each the chunk whose output size is
    sent, -1 for none."""
    pairs = [(n, i) for i, each in enumerate(of_chunks(chunks, micro_batches, split)) for n in each.needs]
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    edges = edges[np.lexsort((edges[:, 1], edges[:, 0]))]
    first, second = edges[:, 0] // micro_batches % chunks, edges[:, 1] // micro_batches % chunks
    cut = np.where(first == second, -1, np.minimum(first, second))
    total = (3 if split else 2) * chunks * micro_batches
    at = np.searchsorted(edges[:, 0], np.arange(total + 1)).astype(np.int32)
    return at, edges[:, 1].astype(np.int32), cut.astype(np.int32)


def chunk_tasks(model: Model, bounds: Ints, micro_batches: int, split: bool, overhead_s: float = 0.0) -> Tasks:
    """The tasks of a step. Chunk c has the layers from `bounds[c]` to `bounds[c + 1] - 1`. The queue of each task is
    its pass and chunk. The forward pass of chunk c takes a place of slot c, and its last pass gives it back."""
    chunks, passes = len(bounds) - 1, 3 if split else 2
    each = np.diff(model.sums[bounds], axis=0)  # [chunks, 6]
    forward, by_input, by_weight, kept, weights, _ = each.T
    work = [forward, by_input, by_weight] if split else [forward, by_input + by_weight]
    nothing = np.zeros(chunks)
    released = [nothing, kept - weights, weights] if split else [nothing, kept]
    handed = np.append(model.outputs[bounds[1:-1] - 1], 0.0)  # the last chunk hands nothing on
    made = [handed, np.append(0.0, handed[:-1]), nothing][:passes]
    at, following, cut = _edges(chunks, micro_batches, split)
    count = passes * chunks * micro_batches

    def spread(columns: list[Floats]) -> Floats:
        return np.repeat(np.concatenate(columns), micro_batches)

    return Tasks(
        spread(work) + spread([nothing + overhead_s, nothing + overhead_s, nothing][:passes]),
        np.zeros(count),
        np.repeat(np.arange(passes * chunks, dtype=np.int32), micro_batches),
        np.zeros(count),
        np.tile(np.repeat(np.arange(chunks, dtype=np.int32), micro_batches), passes),
        np.repeat(np.array([1, 0, -1] if split else [1, -1], np.int32), chunks * micro_batches),
        spread(made),
        spread([kept, nothing, nothing][:passes]),
        spread(released),
        at,
        following,
        np.where(cut < 0, 0.0, handed[cut]),
    )


def room_of(cluster: Cluster, members: Sequence[Sequence[int]]) -> Room:
    """The `Room` of a cluster. `members`: the workers of each queue."""
    host, speed, cores, rate = cluster.arrays()
    return Room(
        host,
        speed,
        cores,
        rate,
        np.cumsum([0, *map(len, members)]).astype(np.int32),
        np.array([w for each in members for w in each], np.int32),
        cluster.hop_s,
        cluster.latency_s,
    )
