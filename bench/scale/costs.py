"""What things cost, in microseconds of a core unless their names say otherwise: measured by `calibrate`, kept in JSON.

What always holds: a file that lacks a cost, or has one below 0, is refused with the line that measures them again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

KEPT = Path(__file__).with_name("costs.json")
"""The measured costs that docs/scale.md is of."""

MEASURED = Path(__file__).parents[1] / "results" / "scale_costs.json"
"""Those of this machine, once `--calibrate` has run."""


@dataclass(frozen=True, slots=True)
class Line:
    """A cost that grows with how many: `base` for each call and `each` for each of them."""

    base: float
    each: float

    def __call__(self, count: float) -> float:
        """Of so many, in seconds."""
        return (self.base + self.each * count) * 1e-6

    @classmethod
    def through(cls, few: tuple[float, float], many: tuple[float, float]) -> Line:
        """The line through two measurements of (count, microseconds), neither part of it below 0."""
        each = max(0.0, (many[1] - few[1]) / (many[0] - few[0]))
        return cls(max(0.0, few[1] - each * few[0]), each)


@dataclass(frozen=True, slots=True)
class Costs:
    """By rows unless said otherwise. `ask` is what a question to another node costs who asks, `home` what it costs who
    answers, `front` what a client's request costs its node beside what the homes do."""

    client_append: Line
    client_consume: Line
    client_ack: Line
    front_append: Line
    ask_append: Line
    home_append: Line
    front_consume: Line
    take: Line
    """A home that grants rows to clients of its own node, the client's request with it."""
    shown: Line
    """By rows that are ready and are not given: the sampler is shown them too."""
    ask_take: Line
    home_take: Line
    ask_watch: float
    home_watch: float
    ack: Line
    """A home whose rows' columns are here, for a client that is here."""
    ask_ack: Line
    home_ack: Line
    settle: Line
    """An ack that the home tells another node, which stores the columns: the sum of both ends."""
    greet: Line
    """By members: greeting one of them, and what is done with its answer."""
    greeted: Line
    """By members: answering one."""
    member_look: Line
    """By members: looking one of them up."""
    gather_look: Line
    """By members: what a gathering does for each of its homes beside asking it."""
    keeper_told: Line
    """By members: who keeps a stream's limits is told what a part holds."""
    keeper_admits: Line
    """By members: it lets in an append."""
    holds: Line
    """By members: a part finds out what it is to tell the keeper."""
    greeted_bytes: Line
    """By members: how long an answer to a greeting is."""
    read_shard: float
    """A small shard of another host: what reading it costs the reader's node."""
    send_shard: float
    """And its owner's."""
    put_s_gb: float
    get_s_gb: float
    link_s_gb: float
    """Of the processor, by who receives."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def of_json(content: dict[str, Any]) -> Costs:
    """Raises ValueError for a cost that is missing or is none."""
    found: dict[str, Any] = {}
    for field in fields(Costs):
        value = content.get(field.name)
        numbers = list(value.values()) if isinstance(value, dict) else [value]
        if not numbers or not all(isinstance(n, int | float) and n >= 0 for n in numbers):
            raise ValueError(f"no cost {field.name!r} in this file; measure: python -m bench.scale --calibrate")
        found[field.name] = Line(**value) if isinstance(value, dict) else value
    return Costs(**found)


def read(path: Path | None = None) -> tuple[Costs, dict[str, Any]]:
    """The costs, and the machine that they are of: from the file, else those of this machine, else the kept ones."""
    path = path or (MEASURED if MEASURED.exists() else KEPT)
    content = json.loads(path.read_text())
    return of_json(content["costs"]), content["machine"]


def write(path: Path, costs: Costs, machine: dict[str, Any], details: dict[str, Any]) -> None:
    """Keep them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "costs": costs.as_json(), "details": details}, indent=1) + "\n")
