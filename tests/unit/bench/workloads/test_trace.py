"""What a step checks when it is made, and the sums it gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bench.workloads import Step
from dataplane.errors import SchemaMismatch
from tests.cases import each_case


def arrays(**changed: Any) -> dict[str, Any]:
    """Two prompts; the first has two responses, of one and of two turns, the second one."""
    made: dict[str, Any] = {
        "input_tokens": [10, 20], "vision_tokens": [4, 0], "images": [1, 0], "patches": [16, 0],
        "group": [0, 0, 1], "reward_seconds": [1.0, 2.0, 3.0], "turns": [1, 2, 1],
        "turn_input_tokens": [10, 10, 7, 20], "turn_output_tokens": [1, 2, 3, 4],
        "engine_seconds": [0.1, 0.2, 0.3, 0.4], "tool_seconds": [0.0, 5.0, 0.0, 0.0],
    }  # fmt: skip
    return made | changed


def test_sums() -> None:
    step = Step(0, **arrays())
    assert (step.prompts, step.responses) == (2, 3)
    assert step.offsets.tolist() == [0, 1, 3, 4]
    assert step.response_tokens.tolist() == [1, 12, 4]
    assert step.of_responses(step.tool_seconds).tolist() == [0, 5, 0]
    assert step.text_bytes == 24 * (10 + 10 + 20) + 72 * 17
    assert (step.patch_bytes, step.repeated_patch_bytes) == (16 * 4704, 2 * 16 * 4704)


@each_case(
    "changed",
    [
        {"images": [1]}, {"engine_seconds": [0.1]}, {"turns": [1, 2, 2]}, {"turns": [1, 3, 0]}, {"group": [0, 1, 0]},
        {"group": [0, 0, 0]}, {"group": [1, 1, 2]}, {"input_tokens": [10, -1]}, {"group": [[0, 0, 1]]},
        {"tool_seconds": [0, float("nan"), 0, 0]}, {"reward_seconds": [1, 2, -3]},
    ],
    ids=str,
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(SchemaMismatch, match="of step 3"):
        Step(3, **arrays(**changed))


def test_a_step_keeps_its_own_arrays() -> None:
    tokens = np.array([10, 20])
    step = Step(0, **arrays(input_tokens=tokens))
    tokens[0] = 99
    assert step.input_tokens.tolist() == [10, 20]
    with pytest.raises(ValueError, match="read-only"):
        step.input_tokens[0] = 1
