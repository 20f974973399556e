"""Who freed shards lately."""

from __future__ import annotations

from dataplane.store.freeings import UNKNOWN, Cause, Freeings


def test_it_says_who_and_when() -> None:
    now = [10.0]
    freeings = Freeings(lambda: now[0])
    freeings.cause = Cause("free", "train.py (pid 7)")
    freeings.note(3, "step-1")
    freeings.cause = UNKNOWN
    freeings.note(4, "")
    now[0] = 12.5
    error = freeings.error(3)
    assert str(error) == "shard 3, put under scope 'step-1', was freed 2.5 s ago by plane.free of train.py (pid 7)"
    assert (error.shard, error.scope, error.freed_by, error.age_s) == (3, "step-1", "train.py (pid 7)", 2.5)
    assert str(freeings.error(4)) == "shard 4 was freed 2.5 s ago"
    unknown = freeings.error(5)
    assert (str(unknown), unknown.age_s) == ("shard 5 was freed", -1.0)


def test_it_remembers_the_last_few_thousand_alone() -> None:
    freeings = Freeings(lambda: 0.0)
    for number in range(5000):
        freeings.note(number, "")
    assert freeings.error(0).age_s == freeings.error(903).age_s == -1.0
    assert freeings.error(904).age_s == freeings.error(4999).age_s == 0.0


def test_of_many_reasons_it_remembers_the_last_and_no_false_one() -> None:
    freeings = Freeings(lambda: 0.0)
    for number in range(600):
        freeings.cause = Cause("stream", f"rollouts-{number}")
        freeings.note(number, "")
    assert (freeings.error(471).freed_by, freeings.error(471).age_s) == ("", 0.0)
    assert freeings.error(472).freed_by == "rollouts-472"
    assert "no task of stream 'rollouts-599' needs" in str(freeings.error(599))


def test_names_of_any_length_fit() -> None:
    freeings = Freeings(lambda: 0.0)
    freeings.cause = Cause("scope", "\N{GRINNING FACE}" * 200)
    freeings.note(1, "\N{GRINNING FACE}" * 200)
    freeings.note(2, "short")
    assert freeings.error(1).scope == freeings.error(1).freed_by == "\N{GRINNING FACE}" * 30
    assert freeings.error(2).scope == "short"
