"""`examples.verl_rollout`, small: by reference it learns what it learns by value, and moves next to nothing."""

from __future__ import annotations

import pytest

from examples.verl_rollout.__main__ import run, text
from examples.verl_rollout.trainer import Job
from tests.integrations.marks import SYSTEMS

pytestmark = SYSTEMS


@pytest.mark.long
def test_a_step_by_reference_is_the_step_by_value(job: None) -> None:
    reports = run(Job(prompts=4, responses=2, steps=2, rollout_workers=1))
    assert list(reports) == ["reference", "value"]
    remote, plain = reports.values()
    assert [step["reward"] for step in remote.steps] == [step["reward"] for step in plain.steps]
    for by_reference, by_value in zip(remote.steps, plain.steps, strict=True):
        assert by_reference["loss"] == pytest.approx(by_value["loss"], abs=1e-5)
    image = 64 * 1176 * 4
    assert image * 4 <= remote.stored < image * 6  # once a prompt, and not once a response
    assert remote.passed * 100 < plain.passed
    assert "peak of controller" in text("reference", remote)
