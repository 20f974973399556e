"""Causes of runs whose causes are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dataplane import cli
from dataplane.diagnosis.causes import Cause, Diagnosis
from dataplane.diagnosis.contention import HostUse
from dataplane.diagnosis.diagnosis import compared, diagnosed
from dataplane.diagnosis.graph import CallSiteRecord, Ender, GraphRun, Line, NodeLoop, ProcessNode, Waited
from dataplane.diagnosis.recorder import BUCKETS, GAP_S

SECONDS = 10.0
FILE = "job.py"


def place(
    number: int, kind: str, line: int, seconds: float, count: int = 100, gap_s: float = 0.0, **said: Any
) -> CallSiteRecord:
    """A line that calls the plane, `gap_s` seconds after the call before."""
    gaps = [0] * BUCKETS
    gaps[min(BUCKETS - 1, int(gap_s / GAP_S).bit_length())] = count if gap_s else 0
    sized = [count, 0.0, 0.0, gap_s * count, gap_s * gap_s * count, 0.0] if gap_s else []
    return CallSiteRecord(number, FILE, line, "work", kind, said, count, seconds, seconds, gap_s * count, gaps, sized)


def line(number: int, seconds: float, rounds: int = 100, function: str = "work", via: str = "") -> Line:
    """A line of user code that takes as long each round."""
    return Line(FILE, number, function, 1, via, seconds, seconds * seconds / rounds)


def waited(at: int, kind: str, seconds: float, *enders: int, what: str = "rows") -> Waited:
    """Waits of a place that these clients have ended, each as many."""
    ended = [Ender(client, 1, 10, seconds / len(enders)) for client in enders]
    return Waited(at, kind, what, 10 * max(1, len(enders)), seconds, ended)


def process(
    number: int,
    role: str,
    places: list[CallSiteRecord],
    lines: list[Line],
    waits: list[Waited] | None = None,
    host: str = "a",
) -> ProcessNode:
    """One that lived all the time."""
    return ProcessNode("n", host, number, 1000 + number, role, role, SECONDS, places, lines, waits or [])


def run(*processes: ProcessNode) -> GraphRun:
    return GraphRun(SECONDS, list(processes))


def consuming(seconds: float, at: int = 1, **said: Any) -> CallSiteRecord:
    """The place of a consumer of stream `rows`."""
    return place(at, "deliveries", 5, seconds, task="t", stream="rows", columns=["ids"], prefetch=1, **said)


def appending(seconds: float, gap_s: float, count: int = 100) -> CallSiteRecord:
    """The place of a producer of stream `rows`."""
    return place(1, "append", 9, seconds, count, gap_s, stream="rows", columns=["ids"])


def first(job: GraphRun) -> Cause:
    return diagnosed(job).causes[0]


def train(waits_s: float, *enders: int) -> ProcessNode:
    return process(1, "actor", [consuming(waits_s)], [line(6, 10.0 - waits_s)], [waited(1, "rows", waits_s, *enders)])


def test_a_limit_is_the_cause_when_two_roles_wait_for_each_other() -> None:
    producer = process(2, "roll_out", [appending(6.0, 0.04)], [line(8, 4.0)], [waited(1, "max_lag", 6.0, 1)])
    cause = first(run(train(4.0, 2), producer))
    assert (cause.kind, cause.setting, cause.line) == ("limit", "max_lag", 9)


def test_a_memory_wait_is_attributed_to_the_budget_or_the_disk_by_what_ends_it() -> None:
    for ender, kind in ((1, "budget"), (0, "disk")):
        producer = process(2, "roll_out", [appending(8.0, 0.02)], [line(8, 2.0)], [waited(1, "memory", 8.0, ender)])
        cause = first(run(train(5.0, 2), producer))
        assert (cause.kind, cause.line) == (kind, 9)


def test_a_late_ack_is_attributed_to_the_line_that_delays_it() -> None:
    for waits_s, kind in ((4.0, "ack"), (0.5, "code")):  # acks do not limit a process that is always busy
        job = run(
            train(6.0, 2),
            process(2, "roll_out", [appending(8.0, 0.02)], [line(8, 2.0)], [waited(1, "max_rows", 8.0, 3)]),
            process(3, "log", [consuming(waits_s)], [line(44, 10.0 - waits_s)], [waited(1, "rows", 0.1, 2)]),
        )
        cause = first(job)
        assert (cause.kind, cause.role, cause.line) == (kind, "log", 44)
        assert [link.kind for link in cause.chain] == ["rows", "max_rows"]


def test_a_last_role_that_is_always_busy_is_noted_with_its_slowest_line() -> None:
    maker = process(2, "roll_out", [appending(9.0, 0.02)], [line(8, 1.0)], [waited(1, "max_rows", 9.0, 1)])
    busy = process(1, "score", [consuming(0.1)], [line(6, 2.0), line(7, 7.9)], [waited(1, "rows", 0.1, 2)])
    (note,) = diagnosed(run(busy, maker)).notes
    assert "'score' is busy 99% of its time" in note
    assert f"{FILE}:7 in work" in note
    assert not diagnosed(run(train(6.0, 2), maker)).notes


def test_remote_reads_are_attributed_to_prefetching_or_to_the_link() -> None:
    for prefetch, kind in ((0, "prefetch"), (2, "link")):
        places = [place(1, "deliveries", 5, 0.1, task="t", stream="rows", prefetch=prefetch), place(2, "get", 6, 6.0)]
        job = run(process(1, "actor", places, [line(7, 3.9)], [waited(2, "fetch", 6.0, 0)]))
        assert (first(job).kind, first(job).line) == (kind, 6)


def test_a_comparison_names_the_role_that_does_not_scale() -> None:
    """Twice as many workers: their own code halves; the one process that scores does not."""

    def job(workers: int, wait_s: float) -> GraphRun:
        rows = [consuming(0.1), place(2, "extend", 7, 0.1, stream="rows", columns=["reward"])]
        score = process(2, "reward", rows, [line(6, 9.8)], [waited(1, "rows", 0.1, 3)])
        many = [process(n, "roll_out", [appending(5.0, 0.05)], [line(8, 5.0)]) for n in range(3, 3 + workers)]
        return run(train(wait_s, 2), score, *many)

    small, large = job(2, 2.0), job(8, 7.0)
    found = compared(small, large)
    cause = found.causes[0]
    assert (cause.role, cause.line) == ("reward", 6)
    assert [(size.processes, size.step_s) for size in found.compared] == [(4, 0.1), (10, 0.1)]
    assert compared(large, small) == found == Diagnosis.read(found.json())


def test_the_text_of_a_comparison_names_both_runs_and_the_speed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = process(1, "actor", [consuming(8.0)], [line(6, 2.0)], [waited(1, "rows", 8.0, 2)])
    makers = [process(n, "roll_out", [appending(1.0, 0.1)], [line(8, 9.0)]) for n in (2, 3)]
    run(small, makers[0]).save(Path("small.run"))
    run(replace(small, places=[consuming(2.0, count=200)]), *makers).save(Path("large.run"))
    assert cli.main(["diagnose", "--compare", "large.run", "small.run"]) == 0
    text = capsys.readouterr().out.splitlines()
    assert text[0] == "small.run: 2 processes, 100.0 ms a step; large.run: 3, 50.0 ms: 2.0 times as fast"
    assert text[1].startswith(
        "large.run: a step of 'actor' takes 50.0 ms, of which 0.0 ms (0%) is additional wait against"
    )
    assert text[-1] == "no wait costs the step more than 2 % beyond small.run"


# What is the host's: processors that are short.


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
    assert any("host n: other processes use 0.6 of its 1 processors (this job 0.2)" in note for note in told.notes)
    assert Diagnosis.read(told.json()) == told


def test_processor_shortage_is_attributed_to_the_job_in_proportion() -> None:
    """It had 1.0 of one processor, beside others, and alone would want 2: half of what it could not have is its own."""
    host = HostUse("n", 2, job=1.0, wanted=3.0, others=1.0)
    assert host.own == pytest.approx(0.5)
    assert HostUse("n", 2, job=1.0, wanted=2.0, others=1.0).own == 0.0
    assert HostUse("n", 2, job=2.0, wanted=9.0, others=0.0).own == 1.0
