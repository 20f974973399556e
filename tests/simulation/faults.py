"""What goes wrong in a run: drawn from its seed, each fault a value, so that a run can be had again with fewer."""

from __future__ import annotations

from random import Random

import msgspec

#: In place of a node's number: who leads, or follows first, when the fault begins.
LEADER, FOLLOWER = -1, -2


class Fault(msgspec.Struct, frozen=True):
    """`kind` names a method of `Injector`. `a` and `b` are nodes, `amount` is the kind's own."""

    start_s: float
    duration_s: float
    kind: str
    a: int = 0
    b: int = 0
    amount: float = 0.0

    def __str__(self) -> str:
        names = {LEADER: "leader", FOLLOWER: "follower"}
        a, b = names.get(self.a, f"n{self.a}"), names.get(self.b, f"n{self.b}")
        return f"{self.start_s:6.3f} s  {self.kind} for {self.duration_s:.3f} s  a={a} b={b} amount={self.amount:.3f}"


class Plan(msgspec.Struct, frozen=True):
    """A run before it is run."""

    seed: int
    nodes: int
    followers: int
    durable: bool
    duration_s: float
    faults: tuple[Fault, ...]
    told_s: float = 0.0
    """Nodes are told, within so long, that another's process has ended; 0: they are not."""
    max_bytes: int = 1 << 20
    """Of a message: the fewer, the more parts a snapshot has."""


#: (kind, weight, shortest, longest): of the last two the logarithm is even.
KINDS = [
    ("cut", 4, 0.05, 2.0), ("cut_one_way", 5, 0.05, 2.0), ("isolate", 5, 0.1, 2.5),
    ("cut_from_coordinator", 3, 0.1, 2.0), ("lossy", 3, 0.2, 1.5), ("duplicating", 2, 0.2, 2.0),
    ("reordering", 3, 0.2, 1.5), ("crash", 6, 0.02, 1.0), ("crash_between_effects", 5, 0.02, 1.0),
    ("crash_all", 2, 0.02, 0.5), ("pause", 4, 0.05, 1.2), ("coordinator_away", 3, 0.1, 2.0),
    ("coordinator_slow", 3, 0.1, 1.5), ("coordinator_mute", 4, 0.1, 1.5), ("coordinator_late", 4, 0.1, 1.5),
    ("slow_disk", 2, 0.1, 1.0), ("recruit", 6, 0.0, 0.0),
]  # fmt: skip
_NAMES = [kind[0] for kind in KINDS]
_WEIGHTS = [kind[1] for kind in KINDS]
_TIMES = {kind[0]: (kind[2], kind[3]) for kind in KINDS}


def plan(seed: int, length: float = 1.0) -> Plan:
    """The run of a seed: the same for ever, but for changes of this file. `length` scales its time."""
    rng = Random(seed)
    nodes = rng.choice((3, 3, 4))
    duration_s = length * rng.uniform(2.0, 4.0)
    durable = rng.random() < 0.5
    faults = []
    for _ in range(rng.randint(5, 14)):
        kind = rng.choices(_NAMES, _WEIGHTS)[0]
        shortest, longest = _TIMES[kind]
        length = shortest * (longest / shortest) ** rng.random() if shortest else 0.0
        a = rng.choice((LEADER, LEADER, FOLLOWER, rng.randrange(nodes)))
        b = rng.choice((FOLLOWER, rng.randrange(nodes), rng.randrange(nodes)))
        faults.append(Fault(round(rng.uniform(0.2, duration_s), 3), round(length, 3), kind, a, b, rng.random()))
    followers, newer = rng.choice((1, 2)), seed % 4 < 2
    if newer and not durable and rng.random() < 0.5:  # who keeps nothing hears that a leader has ended
        at, away_s = rng.uniform(1.0, duration_s), rng.uniform(0.05, 1.0)
        faults.append(Fault(round(at, 3), round(away_s, 3), "coordinator_wiped", amount=rng.random()))
        if rng.random() < 0.6:  # somebody knows less than the coordinator did
            before_s = rng.uniform(0.35, 0.9)
            a, cut_s = rng.choice((LEADER, FOLLOWER)), before_s + rng.uniform(0.0, 1.0)
            faults.append(Fault(round(at - before_s, 3), round(cut_s, 3), "isolate", a, amount=0.39 * rng.random()))
    return Plan(
        seed,
        nodes,
        followers,
        durable,
        duration_s,
        tuple(sorted(faults, key=lambda f: f.start_s)),
        1.0 if newer else 0.0,
        200 if newer else 1 << 20,
    )
