"""Cuts a model's layers into chunks with equal work for each worker, and computes a lower bound for all plans.

With one chunk for each worker, the cuts have the smallest possible maximum, found by bisection. With several chunks, it
starts with equal ones, and moves a cut by one layer as long as that makes the loads of the workers more equal.
"""

from __future__ import annotations

import numpy as np

from dataplane.pipeline.events import Floats, Ints
from dataplane.pipeline.models import Model

_SHARP = 8  # exponent of the norm that approximates the maximum, and also changes with loads below it
_ROUNDS = 400


def seconds_before(model: Model) -> Floats:
    """float64 `[layers + 1]`: the seconds of all passes of all layers before each."""
    return np.asarray(model.sums[:, :3].sum(axis=1))


def allowed_cuts(model: Model) -> Ints:
    """The layers before which a chunk may begin, and the number of layers."""
    count = len(model.layers)
    cuts = range(1, count) if model.cuts is None else [cut for cut in model.cuts if 0 < cut < count]
    return np.array([0, *cuts, count], np.int32)


def balanced(model: Model, chunks: int) -> Ints:
    """The bounds of this many chunks with the smallest maximum of seconds.

    Raises ValueError if the model cannot be cut into that many.
    """
    cuts = allowed_cuts(model)
    if len(cuts) - 1 < chunks:
        raise ValueError(f"{model.name} can be cut into {len(cuts) - 1} chunks, not {chunks}")
    at = seconds_before(model)[cuts]
    low, high = max(at[-1] / chunks, float(np.diff(at).max())), float(at[-1])
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _fits(at, middle, chunks) is not None else (middle, high)
    found = _fits(at, high * (1 + 1e-12), chunks)
    assert found is not None
    return np.asarray(cuts[_even(at, found, chunks)], np.int32)


def _fits(at: Floats, most: float, chunks: int) -> list[int] | None:
    """The bounds of chunks of at most `most` seconds, each as long as possible. None if these are more than
    `chunks`."""
    bounds = [0]
    while bounds[-1] < len(at) - 1:
        end = int(np.searchsorted(at, at[bounds[-1]] + most, "right")) - 1
        if end <= bounds[-1] or len(bounds) > chunks:
            return None
        bounds.append(end)
    return bounds if len(bounds) <= chunks + 1 else None


def _even(at: Floats, bounds: list[int], chunks: int) -> list[int]:
    """The bounds of exactly `chunks` chunks, after halving the longest chunks that can be divided."""
    bounds = list(bounds)
    while len(bounds) < chunks + 1:
        long = max(
            (i for i in range(len(bounds) - 1) if bounds[i + 1] - bounds[i] > 1),
            key=lambda i: at[bounds[i + 1]] - at[bounds[i]],
        )
        middle = (at[bounds[long]] + at[bounds[long + 1]]) / 2
        cut = int(np.clip(np.searchsorted(at, middle), bounds[long] + 1, bounds[long + 1] - 1))
        bounds.insert(long + 1, cut)
    return bounds


def even_out(model: Model, bounds: Ints, worker_of: Ints, speed: Floats, held: Floats | None = None) -> Ints:
    """The bounds after moving cuts by a layer while the workers' loads become more equal.

    worker_of: the worker of each chunk. held: float64 `[chunks]`, the micro-batches that each holds at a time; if
    given, the largest memory does not grow.
    """
    cuts = allowed_cuts(model)
    at, index = seconds_before(model)[cuts], np.searchsorted(cuts, bounds)
    state = model.sums[cuts, 5]
    kept = model.sums[cuts, 3]
    workers = int(worker_of.max()) + 1

    def loads(index: Ints) -> Floats:
        return np.asarray(np.bincount(worker_of, np.diff(at[index]), workers) / speed[:workers])

    def bytes_of(index: Ints) -> Floats:
        each = np.diff(state[index]) + (held if held is not None else 0.0) * np.diff(kept[index])
        return np.asarray(np.bincount(worker_of, each, workers))

    most_bytes = max(float(bytes_of(index).max()), 1e-300) * (1 + 1e-9)
    mean = at[-1] / workers
    current = loads(index)
    for _ in range(_ROUNDS):
        score = float(((current / mean) ** _SHARP).sum())
        best, best_index = score * (1 - 1e-9), None
        for i in range(1, len(index) - 1):
            for step in (-1, 1):
                moved = index[i] + step
                if not index[i - 1] < moved < index[i + 1]:
                    continue
                a, b = worker_of[i - 1], worker_of[i]
                shift = at[moved] - at[index[i]]
                if a == b:
                    continue
                la, lb = current[a] + shift / speed[a], current[b] - shift / speed[b]
                new = score + float(
                    (la / mean) ** _SHARP
                    + (lb / mean) ** _SHARP
                    - (current[a] / mean) ** _SHARP
                    - (current[b] / mean) ** _SHARP
                )
                if new < best:
                    candidate = index.copy()
                    candidate[i] = moved
                    if held is None or bytes_of(candidate).max() <= most_bytes:
                        best, best_index = new, candidate
        if best_index is None:
            break
        index, current = best_index, loads(best_index)
    return np.asarray(cuts[index], np.int32)


def lower_bound(model: Model, workers: int, micro_batches: int, speed: Floats) -> float:
    """A lower bound of the seconds of every plan of this model, with this many workers of these speeds.

    The maximum of three bounds. First, all work over all workers, with their waits at the beginning: the k-th worker to
    begin waits at least for the forward passes of k - 1 pieces. Second, any indivisible piece for all micro-batches,
    after the forward passes of the pieces before it, and with either its own gradients of weights or their backward
    passes. Third, one micro-batch forward and backward. Transfers and memory are ignored.
    """
    cuts = allowed_cuts(model)
    fastest, all_speed = float(speed.max()), float(speed.sum())
    sums = model.sums[cuts]
    forward, by_input = sums[:, 0], sums[:, 1]
    total = float(sums[-1, :3].sum()) * micro_batches
    waits = float(forward[: min(workers, len(forward) - 1)].sum()) / fastest
    filled = (total + waits * float(speed.min())) / all_speed
    pieces = np.diff(sums, axis=0)
    there = forward[:-1] + micro_batches * pieces[:, :2].sum(axis=1)
    longest = float(np.maximum(there + micro_batches * pieces[:, 2], there + by_input[:-1]).max()) / fastest
    once = float(forward[-1] + by_input[-1] + pieces[0, 2]) / fastest
    return max(filled, longest, once)
