"""A durable partition that is killed at random under load: nothing answered is lost, nothing acked comes again.

`KILLS=100 pytest tests/chaos/test_durable.py` kills more often.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

KILLS = int(os.environ.get("KILLS", "3"))


@dataclass
class History:
    """What clients were told in all lives, and what of it did not hold."""

    rows: dict[int, str] = field(default_factory=dict)  # labels of rows whose append was answered, by offset
    acked: set[int] = field(default_factory=set)
    last: dict[str, int] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    recovered: int = 0

    def told(self, what: str, *more: Any) -> None:
        getattr(self, f"_{what}")(*more)

    def _rows(self, labels: list[str], done: list[int], missing: list[int]) -> None:
        self.recovered += 1
        self._holds(not missing, f"rows are there whose shards {missing} are not")
        lost = {offset: label for offset, label in self.rows.items() if labels[offset : offset + 1] != [label]}
        self._holds(not lost, f"answered rows are lost: {lost}")
        self._holds(self.acked <= set(done), f"acks are lost: {self.acked - set(done)}")
        names = [label.partition(":")[0] for label in labels]
        self._holds(len(set(names)) == len(names), "a row is there twice")

    def _appended(self, client: str, sequence: int, offsets: list[int], labels: list[str]) -> None:
        self.rows |= dict(zip(offsets, labels, strict=True))
        self.last[client] = sequence

    def _leased(self, offsets: list[int]) -> None:
        again = self.acked & set(offsets)
        self._holds(not again, f"rows came again after their ack: {again}")

    def _acked(self, offsets: list[int]) -> None:
        self.acked |= set(offsets)

    def _wrong(self, shard: int) -> None:
        self._holds(False, f"shard {shard} has other bytes than were put")

    def _failed(self, why: str) -> None:
        self._holds(False, why)

    def _holds(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.broken.append(otherwise)


def live(directory: Path, history: History, seconds: float, *, starting: bool) -> None:
    """One life, killed so long after it was started, or after it had recovered."""
    command = [sys.executable, "-m", "tests.chaos.durable_host", str(directory), json.dumps(history.last)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as host:
        assert host.stdout is not None
        killing = threading.Timer(seconds, host.kill)
        if starting:
            killing.start()
        for line in host.stdout:
            if not line.endswith(b"\n"):
                break
            history.told(*json.loads(line))
            if not starting and killing.ident is None:
                killing.start()
        killing.cancel()
        if killing.ident is not None:
            killing.join()


@pytest.mark.timeout(max(120, 15 * KILLS))
def test_killed_at_random_under_load(tmp_path: Path) -> None:
    draw, history = random.Random(), History()
    for number in range(KILLS):
        starting = number % 5 == 3
        live(tmp_path / "data", history, draw.uniform(0.0, 1.2 if starting else 0.5), starting=starting)
        assert history.broken == []
    live(tmp_path / "data", history, 0.2, starting=False)
    assert history.broken == []
    assert history.recovered > KILLS / 2
    assert len(history.rows) > 10 * KILLS, "it was under load"
    assert len(history.acked) > 2 * KILLS
    print(f"{KILLS} kills: {len(history.rows)} rows answered, {len(history.acked)} acked")  # noqa: T201
