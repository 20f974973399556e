"""PolyTrace's files: what was written is read again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench.workloads import TASKS, generate, read, write
from bench.workloads.trace import ARRAYS
from tests.cases import each_case


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


@each_case("name", TASKS)
def test_a_generated_trace_round_trips_through_its_file(name: str, file: Path) -> None:
    made = generate(name, prompts=12, steps=2, seed=5)
    write(made, file)
    again = read(file)
    assert len(again.steps) == 2
    for one, other in zip(made.steps, again.steps, strict=True):
        for array in ARRAYS:
            assert np.array_equal(getattr(one, array), getattr(other, array)), array
