"""Producers, consumers and drafters of one stream, killed at random moments under load: see `tests.chaos.kills`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.chaos import kills


def attack(seed: int, seconds: float, directory: Path) -> Mapping[str, object]:
    """See `tests.attack`."""
    found = kills.run(seed, 1 << 30, directory, seconds)
    assert not found.broken, found.broken[:5]
    return {"kills": found.kills, "rows appended": found.appended, "acked": found.acked}
