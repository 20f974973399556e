"""The example over several hosts: on loopback, with a host that dies, and what it prints where it may not do more."""

from __future__ import annotations

import io

import pytest

pytest.importorskip("torch")

from examples.multi_host import job as hosts
from examples.multi_host.machine import Machine
from examples.multi_host.view import View
from examples.multimodal_grpo.job import Job
from tests.etcd import needs_etcd
from tests.optional import needs

pytestmark = needs("sklearn")


@pytest.fixture(autouse=True)
def _no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)


@pytest.mark.long
@needs_etcd
def test_the_job_continues_when_hosts_die_and_one_is_silent() -> None:
    small = {"prompts": 8, "smallest": 56, "largest": 84, "in_flight": "4MiB"}
    job = Job(pauses=(0.0, 0.0), steps=30, target=0.0, averaged=50, seconds=150.0, **small)
    out = io.StringIO()
    view = View(job, hosts.HOSTS, out)
    with Machine(3, "48MiB", loopback=True) as machine:
        hosts.run(job, machine, view, kill_at=4)
    assert view.summary() == 0, out.getvalue()
    assert [step.number for step in view.steps] == list(range(1, len(view.steps) + 1))
    assert view.finished is not None
    assert view.finished.books.again == 0
    assert view.exact, out.getvalue()
    assert all(host.peak <= host.budget for host in view.last)
    assert view.last[0].peak > 0
    said = [line.partition(" s  host ")[2] for line in out.getvalue().splitlines() if " s  host " in line]
    expected = ["which leads rollouts/", "is started again", "which runs etcd's leader", "is started again"]
    expected += ["does not run", "is back after 3 s"]
    told = [what.partition(" ")[2].removeprefix(",").strip() for what in said]
    assert len(told) == len(expected)
    assert all(what.startswith(begin) for what, begin in zip(told, expected, strict=True)), told
    assert len(view.made_again) == len(set(view.made_again)), "each is named once"
