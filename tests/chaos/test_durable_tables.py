"""A node whose durable table is under load is killed at random: what was answered is as it was answered.

`KILLS=100 pytest tests/chaos/test_durable_tables.py` kills more often.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import xxhash

import dataplane as dp
from tests.chaos.test_durable import KILLS, MIB, live, living

WRITERS, TAKERS = 2, 2
NAMES = 40  # of rows that a writer writes again and again
SIZES = (300, 5_000, 40_000, MIB)
TASK = "train"


@dataclass
class Writer:
    """What one writer was answered: the digest of each of its rows. What was not answered is asked again as it was."""

    name: str
    draw: random.Random
    worked: threading.Event
    there: dict[str, str] = field(default_factory=dict)
    asked: tuple[list[str], list[bytes] | None] | None = None
    answered: int = 0

    def next(self) -> tuple[list[str], list[bytes] | None]:
        """Rows to be written or, without values, cleared."""
        if self.draw.random() < 0.2 and self.there:
            return self.draw.sample(sorted(self.there), min(3, len(self.there))), None
        names = self.draw.sample(range(NAMES), self.draw.randint(1, 4))
        return [f"{self.name}.{name}" for name in names], [self.draw.randbytes(self.draw.choice(SIZES)) for _ in names]

    def work(self, plane: dp.Plane) -> None:
        table = plane.table("rows", durable=True)
        while True:
            self.asked = self.asked or self.next()
            keys, rows = self.asked
            if rows is None:
                table.clear(keys)
                for key in keys:
                    self.there.pop(key, None)
            else:
                tags = [{"sum": xxhash.xxh3_64_hexdigest(row)} for row in rows]
                table.upsert(keys, {"x": rows}, tags=tags)
                self.there.update({key: tag["sum"] for key, tag in zip(keys, tags, strict=True)})
            self.answered += 1
            self.asked = None
            self.worked.set()


@dataclass
class Taker:
    """What one taker was given, by claim; and it makes the rows that it takes. Those of its last claim may be taken
    without an answer."""

    name: str
    draw: random.Random
    given: dict[str, list[int]] = field(default_factory=dict)

    def work(self, plane: dp.Plane) -> None:
        table = plane.table("taken", durable=True)
        while True:
            number = len(self.given)
            table.upsert([f"{self.name}.{number}.{at}" for at in range(3)], tags=[{"at": at} for at in range(3)])
            claim = f"{self.name}.{number}"
            ready = table.ready([], task=TASK, claim_id=claim, timeout=1.0)
            taken = table.claim(TASK, ready[: self.draw.randint(1, 3)], claim_id=claim)
            if taken is not None:
                self.given[claim] = taken.tolist()


def check(path: Path, writers: list[Writer], takers: list[Taker]) -> None:
    """In a last life: rows, their columns and tags, what was taken, and under which claim."""
    with living(path) as (_, plane):
        table = plane.table("rows")
        seen = table.look(columns=["x"])
        tags = dict(zip(seen.keys, seen.tags, strict=True))
        for writer in writers:
            unsettled = set(writer.asked[0]) if writer.asked else set()
            found = {key for key in seen.keys if key.startswith(f"{writer.name}.")}
            assert found - unsettled == writer.there.keys() - unsettled
            for key in sorted(found):
                (row,) = plane.get(table.read([key], ["x"]))["x"]
                assert tags[key]["sum"] == xxhash.xxh3_64_hexdigest(row), key
                if key not in unsettled:
                    assert tags[key]["sum"] == writer.there[key], key
        taken, given = plane.table("taken"), [rows for taker in takers for rows in taker.given.values()]
        numbers = [number for rows in given for number in rows]
        assert len(set(numbers)) == len(numbers), "a row was given twice"
        assert taken.claimed(TASK, sorted(numbers)).all()
        for taker in takers:
            for claim, rows in taker.given.items():
                found_rows = taken.find_claim(TASK, claim)
                assert found_rows is not None, claim
                assert found_rows.tolist() == rows


@pytest.mark.timeout(max(180, 20 * KILLS))
def test_durable_tables_survive_random_kills_under_load(tmp_path: Path) -> None:
    draw, worked = random.Random(), threading.Event()
    writers = [Writer(f"w{n}", random.Random(draw.random()), worked) for n in range(WRITERS)]
    takers = [Taker(f"t{n}", random.Random(draw.random())) for n in range(TAKERS)]
    works = [each.work for each in (*writers, *takers)]
    lives = 0
    for number in range(KILLS):
        starting = number % 5 == 3
        lives += live(tmp_path, works, worked, draw.uniform(0.0, 3.0 if starting else 1.5), starting=starting)
    check(tmp_path, writers, takers)
    assert lives > KILLS / 2
    answered = sum(writer.answered for writer in writers), sum(len(taker.given) for taker in takers)
    assert answered[0] > KILLS / 2, "it was under load"
    print(f"{KILLS} kills: {answered[0]} writes and {answered[1]} claims answered")  # noqa: T201
