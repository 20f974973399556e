"""The example over several hosts: on loopback, with a host that dies, and what it prints where it may not do more."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import dataplane as dp
from bench import namespaces
from dataplane.wire import auth
from examples.multi_host import __main__ as command
from examples.multi_host import job as hosts
from examples.multi_host import stages
from examples.multi_host.machine import Machine
from examples.multi_host.view import View
from examples.multimodal_grpo.job import Job
from tests.etcd import needs_etcd
from tests.netns import needs_namespaces
from tests.optional import needs

pytestmark = needs("sklearn")


@pytest.fixture(autouse=True)
def _no_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)


@pytest.mark.long
@needs_etcd
def test_the_job_goes_on_when_hosts_die_and_one_is_silent() -> None:
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


def test_a_prompt_that_is_made_again_shows_the_same_picture() -> None:
    assert stages.picture_of("1.0/7+", 1500) == stages.picture_of("1.0/7", 1500) != stages.picture_of("1.0/8", 1500)


def test_what_dies_elsewhere_is_gone_on_from_and_what_dies_here_is_not() -> None:
    with dp.connect(config=dp.NodeConfig(memory="2MiB", spill=0, prewarm=0)) as plane:
        for passing in (dp.PeerUnavailable("who?"), dp.OwnerDied("gone"), dp.LeaseExpired("late")):
            with stages.going_on(plane):
                raise passing
        with pytest.raises(dp.Misuse), stages.going_on(plane):
            raise dp.Misuse("wrong")
    with pytest.raises(dp.Closed), stages.going_on(plane):
        raise dp.PeerUnavailable("who?")


def test_an_append_of_prompts_is_one_however_often_it_is_made() -> None:
    with dp.connect(config=dp.NodeConfig(memory="2MiB", spill=0, prewarm=0)) as plane:
        rollouts = plane.stream("rollouts", tasks=["actor"])
        rows = plane.put({"x": np.arange(4)})
        for _ in range(2):
            stages.append(plane, rollouts, rows, ["0.0/0", "0.0/1"], 3)
        assert rollouts.stats()["appended"] == 4
        rollouts.drop()


def test_without_namespaces_it_says_why_and_goes_on_loopback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(command, "why_not", lambda: "root is needed")
    monkeypatch.setattr(command, "Machine", lambda *args, **settings: made.append(settings))
    command._cluster(command._parser().parse_args([]))
    assert made == [{"loopback": True}]
    assert "root is needed" in capsys.readouterr().out


@pytest.mark.long
@needs_namespaces
def test_hosts_of_namespaces_have_a_link_each_and_leave_nothing(tmp_path: Any) -> None:
    auth.generate(tmp_path / "cluster.key")
    options = ("--spill", "0", "--prewarm", "0")
    with (
        namespaces.switch(2) as ends,
        namespaces.nodes(ends, tmp_path, memory="16MiB", options=options) as both,
        dp.connect(both[0].address) as one,
        dp.connect(both[1].address) as other,
    ):
        namespaces.together([one, other])
        before = both[1].received()
        other.get(one.put({"x": np.zeros(1 << 20, np.uint8)}))
        assert 1 << 20 < both[1].received() - before < 2 << 20
        names = [name for name, _ in ends]
        assert all(os.path.exists(f"/run/netns/{name}") for name in names)
    assert not any(os.path.exists(f"/run/netns/{name}") for name in names)
