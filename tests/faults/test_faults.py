"""Failed calls into the operating system: one occurrence of each call and errno, and each that can fail a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cases import each_case
from tests.faults.cells import STARTING, sample
from tests.faults.driver import trials
from tests.faults.shim import name
from tests.faults.subject import Subject
from tests.faults.trial import Outcome

pytestmark = pytest.mark.long

SEED = 14
GROUPS = {
    "open": {"open"},
    "write": {"write", "close"},
    "read": {"read", "fstat"},
    "delete": {"unlink"},
    "serve": {"accept", "getsockopt", "epoll_ctl", "send", "sendmsg", "recv"},
    "memory": {"mmap", "memfd_create", "ftruncate", "fchmod", "fcntl", "madvise", "pthread_create"},
}


def test_every_sampled_system_call_belongs_to_a_group() -> None:
    assert {cell.call for cell in sample(SEED)} == set().union(*GROUPS.values())


@each_case("group", GROUPS)
def test_a_node_lives_through_failed_calls_and_recovers(tmp_path: Path, shim: Path, group: str) -> None:
    cells = [cell for cell in sample(SEED) if cell.call in GROUPS[group]]
    outcomes = list(trials(tmp_path, shim, cells))
    assert [outcome for outcome in outcomes if not isinstance(outcome, Outcome)] == []
    assert sum(isinstance(outcome, Outcome) and outcome.failed > 0 for outcome in outcomes) >= len(cells) / 2


@each_case(("call", "error", "target"), STARTING, ids=lambda value: name(value) if isinstance(value, int) else value)
def test_a_failing_node_start_reports_its_reason_and_leaves_nothing(
    tmp_path: Path, shim: Path, call: str, error: int, target: str
) -> None:
    with Subject(tmp_path, shim, armed=(call, error, target)) as node:
        assert node.address == ""
        assert node.wait() == 1
        assert node.rule.failed == 1
        assert any(line.startswith("dataplane node: ") for line in node.logged().splitlines()), node.logged()
        assert not [*node.runtime.iterdir(), *node.spill.glob("*")]
