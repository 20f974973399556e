"""The example, small: the same steps of OpenRLHF by reference and by value give the same numbers."""

from __future__ import annotations

import pytest

from examples.openrlhf_rollout.__main__ import main
from tests.integrations.marks import SYSTEMS

pytestmark = SYSTEMS


def put_mib(lines: list[str]) -> float:
    (line,) = [line for line in lines if "the driver put" in line]
    return float(line.split()[3])


@pytest.mark.long
def test_the_example_has_the_same_loss_by_reference_as_by_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")  # which it changes
    main(["--prompts", "2", "--answers", "2", "--side", "112", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    first, second = lines.index("by reference"), lines.index("by value")
    lazy, plain = lines[first:second], lines[second:]
    assert lazy[1].rpartition(",")[0] == plain[1].rpartition(",")[0]  # the loss and the reward; not the time
    assert put_mib(lazy) < put_mib(plain) / 20
