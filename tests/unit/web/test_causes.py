"""Causes of a diagnosis, in words for the page."""

from __future__ import annotations

import asyncio

import pytest

from dataplane.web.causes import MAX_CAUSES, Causes, said


def test_a_plane_without_graphs_has_no_causes() -> None:
    causes = Causes()

    async def never() -> None:
        raise AssertionError("nothing is looked at")

    asyncio.run(causes.watch(object(), never))
    assert causes.found == ()


def test_causes_are_told_with_their_cost_and_what_to_change() -> None:
    values = pytest.importorskip("dataplane.diagnosis.causes", reason="this build has no diagnosis")
    link = values.Link("actor", "h1", "train.py", 40, "main", "rows", 1.5)
    cause = values.Cause(
        "code", "reward.py", 17, "score", "reward", "h1", (31, 32), 1.25, 0.4, (link,), "workers", "add workers"
    )
    small = values.Cause("disk", "a.py", 1, "", "actor", "", (1,), 0.001, 0.001, (), "", "")
    diagnosis = values.Diagnosis(10.0, "actor", 3.0, 3.1, 1.5, (cause,) * 9 + (small,), ())
    found = said(diagnosis)
    assert len(found) == MAX_CAUSES
    assert found[0].what == "reward: code in score"
    assert found[0].cost == "1.25 s of a step, 40 %"
    assert found[0].where == "reward.py:17, 2 processes on h1"
    assert found[0].chain == "actor waits for rows (1.50 s)"
    assert found[0].change == "workers: add workers"


def test_a_host_that_others_crowd_comes_after_the_causes() -> None:
    values = pytest.importorskip("dataplane.diagnosis.causes", reason="this build has no diagnosis")
    cause = values.Cause("code", "a.py", 1, "", "actor", "h1", (1,), 0.1, 0.1, (), "", "")
    crowds = values.Crowded("h1", 2, 0.25, 1.5, 0.3, 0.3), values.Crowded("h2", 2, 0.25, 0.1, 0.001, 0.001)
    found = said(values.Diagnosis(10.0, "actor", 3.0, 1.0, 0.5, (cause,), (), (), crowds))
    assert [each.what for each in found] == ["actor: code", "Beside the causes: others crowd h1"]
    assert found[1].where == "of its 2 processors this job takes 0.2, others 1.5"
    assert found[1].cost == "0.30 s of a step, 30 %"
