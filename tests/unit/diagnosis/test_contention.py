"""What is the host's: processors that are short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dataplane.diagnosis.causes import Diagnosis
from dataplane.diagnosis.contention import HostUse
from dataplane.diagnosis.diagnosis import diagnosed
from dataplane.diagnosis.graph import GraphRun, NodeLoop
from tests.unit.diagnosis.runs import appending, consuming, line, process, run, waited


def job(append_s: float, *, queued_s: float = 0.0, others: float = 0.0) -> GraphRun:
    """A producer whose appends take so long, and a consumer that waits for it, on hosts of one processor each, of which
    others take so much."""
    rest = 10.0 - append_s
    maker = process(2, "roll_out", [appending(append_s, rest / 100)], [line(8, rest)])
    taker = process(1, "actor", [consuming(9.0)], [line(20, 1.0)], [waited(1, "rows", 9.0, 2)])
    found = run(taker, replace(maker, ran_s=1.0, queued_s=queued_s))
    names = ("n", "other")
    found.processes.append(replace(maker, node="other", number=3, pid=1003))
    for name in names:
        node = NodeLoop(name, 1.0, queued_s, processors=1, busy_s=10.0 * others)
        found.nodes[name] = node
    return found


def test_processor_contention_by_other_jobs_is_reported_beside_the_causes() -> None:
    """The same queueing, of a job that alone would want half a processor: a line that is the job's own comes first."""
    found = job(8.0, queued_s=1.0, others=0.8)
    told = diagnosed(found)
    assert "processor" not in {cause.kind for cause in told.causes}
    crowded = told.crowded[0]
    assert (crowded.host, crowded.processors) == ("n", 1)
    assert crowded.others == pytest.approx(0.6)  # of 0.8 that were busy, the node and its process ran 0.2
    assert crowded.seconds == pytest.approx(crowded.share * told.step_s)
    assert crowded.share > 0.02
    assert any("others crowd n: of its 1 the job takes 0.2, others 0.6" in note for note in told.notes)
    assert Diagnosis.read(told.json()) == told


def test_processor_shortage_is_attributed_to_the_job_in_proportion() -> None:
    """It had 1.0 of one processor, beside others, and alone would want 2: half of what it could not have is its own."""
    host = HostUse("n", 2, job=1.0, wanted=3.0, others=1.0)
    assert host.own == pytest.approx(0.5)
    assert HostUse("n", 2, job=1.0, wanted=2.0, others=1.0).own == 0.0
    assert HostUse("n", 2, job=2.0, wanted=9.0, others=0.0).own == 1.0
