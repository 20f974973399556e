"""Fewer faults that break the same invariant: each is left out in turn, for as long as some can be."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from tests.simulation.faults import Plan
from tests.simulation.run import Outcome, run

Runner = Callable[[Plan], Outcome]


def shrink(outcome: Outcome, run: Runner = run) -> Outcome:
    """A run of the same seed that breaks as this one did, from which no fault can be left out. Some hundred runs at
    most."""
    assert outcome.broken is not None
    number = outcome.broken.split(":")[0]
    smallest = outcome
    again = True
    while again:
        again = False
        for fault in smallest.plan.faults:
            fewer = tuple(f for f in smallest.plan.faults if f is not fault)
            tried = run(msgspec.structs.replace(smallest.plan, faults=fewer))
            if tried.broken is not None and tried.broken.split(":")[0] == number:
                smallest, again = tried, True
    return smallest


def kept(whole: Plan, part: Plan) -> list[int]:
    """Which of a plan's faults are left in a part of it."""
    return [i for i, fault in enumerate(whole.faults) if any(fault is other for other in part.faults)]


def only(whole: Plan, faults: list[int]) -> Plan:
    return msgspec.structs.replace(whole, faults=tuple(whole.faults[i] for i in faults))


def report(outcome: Outcome, run: Runner = run, make: str = "make simulate") -> str:
    """What broke, what had to go wrong for it, and how to have it again."""
    whole, plan = outcome.plan, shrink(outcome, run)
    faults = kept(whole, plan.plan)
    keep = f" KEEP={','.join(map(str, faults))}" if faults else " KEEP=none"
    kind = "durable" if whole.durable else "in memory"
    return "\n".join(
        [
            f"seed {whole.seed} breaks an invariant ({whole.nodes} nodes, {whole.followers} wanted followers, {kind}):",
            f"  {outcome.broken}",
            f"with {len(faults)} of its {len(whole.faults)} faults it still does, at {plan.ended_s:.3f} s:",
            f"  {plan.broken}",
            *(f"  {fault}" for fault in plan.plan.faults),
            f"again: {make} SEED={whole.seed}, or with these alone: {make} SEED={whole.seed}{keep}",
        ]
    )
