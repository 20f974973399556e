"""A check before a replay: whether it fits the machine, and the scale of pixels that would fit."""

from __future__ import annotations

import math
from dataclasses import replace

import psutil

import dataplane as dp
from bench.replaying.plan import Plan
from bench.workloads.vision import PATCH_BYTES

PROCESS_BYTES = 150 << 20
"""The limit of a process's private memory."""

_USED = 0.8  # the share of the memory budget for rows that are read and written at once


def room(config: dp.NodeConfig) -> tuple[int, int]:
    """Bytes of memory and disk of a node with these settings; of the disk, at most the free ones."""
    there = next(path for path in (config.spill_path, *config.spill_path.parents) if path.exists())
    return config.memory_bytes, min(config.spill_bytes, psutil.disk_usage(str(there)).free)


def why_not(plan: Plan, memory: int, spill: int) -> str:
    """A message with the size that does not fit this machine, and a scale that would; empty if all fits."""
    needed = memory + (plan.processes + 2) * PROCESS_BYTES
    if needed > (free := psutil.virtual_memory().available):
        return (
            f"{memory / 2**30:.2f} GiB of budget and {plan.processes + 2} processes need {needed / 2**30:.1f} GiB of "
            f"memory, and {free / 2**30:.1f} are free: a smaller --memory, or fewer ranks, would fit"
        )
    if not (held := _too_much(plan, memory, spill)):
        return ""
    scale = _fitting(plan, memory, spill)
    advice = f"--payload-scale {scale:g} would fit" if scale else "fewer --prompts or --samples would fit"
    return f"{held}: {advice}"


def _too_much(plan: Plan, memory: int, spill: int) -> str:
    if (at_once := _at_once(plan)) > _USED * memory:
        return (
            f"{at_once / 2**30:.2f} GiB are read and written at once, more than {_USED:.0%} of the budget of "
            f"{memory / 2**30:.2f} GiB (--memory; fewer rows of --micro make it less)"
        )
    if (held := _held(plan)) > (room := _USED * memory + spill):
        return (
            f"{held / 2**30:.2f} GiB are in the plane at once, and memory and disk hold {room / 2**30:.2f} (--memory, "
            f"--spill, --spill-dir)"
        )
    return ""


def _held(plan: Plan) -> int:
    """The most bytes in the plane at once: of the largest `1 + max_lag` adjacent steps."""
    sizes = [plan.stored_bytes(step) for step in plan.trace.steps]
    together = 1 + plan.max_lag
    return max(sum(sizes[at : at + together]) for at in range(len(sizes)))


def _at_once(plan: Plan) -> int:
    """The most bytes of pixels pinned by readers and reserved by writers, if all have the largest prompt. The reference
    gets siblings together."""
    if not plan.pixels:
        return 0
    largest = PATCH_BYTES * max(int(plan.patches(step).max()) for step in plan.trace.steps)
    return largest * (plan.workers + 2 * plan.reference.count + plan.trainer.count * plan.micro)


def _fitting(plan: Plan, memory: int, spill: int) -> float:
    """The largest scale, of two digits, that fits; 0 if none fits."""
    low, high = 0.0, plan.payload_scale
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if _too_much(replace(plan, payload_scale=middle), memory, spill) else (middle, high)
    if low < 0.001:
        return 0.0
    digits = 1 - math.floor(math.log10(low))
    return math.floor(low * 10**digits) / 10**digits
