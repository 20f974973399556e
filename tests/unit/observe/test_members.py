"""The members as text."""

from __future__ import annotations

from dataplane.observe.members import members_text

ONE = {"address": "tcp://10.0.0.1:7000", "transports": {"nixl": "x", "tcp": "y"}, "self": True}
TWO = {"address": "tcp://10.0.0.2:7000", "transports": {"tcp": "y"}, "self": False}


def test_the_members_of_a_node_that_is_alone() -> None:
    assert members_text({}) == "this node is alone"


def test_members_with_what_they_lead_and_a_coordinator_that_answers_or_not() -> None:
    found = {
        "members": {
            "aa": ONE | {"leads": [f"rollouts/{number}" for number in range(6)], "follows": ["rollouts/7"]},
            "bb": TWO | {"leads": [], "follows": []},
        },
        "read_bytes": {"nixl": 0, "tcp": 0},
        "coordination": {"coordinator": "etcd at 10.0.0.9:2379", "answers": True},
    }
    assert members_text(found).splitlines() == [
        "aa  tcp://10.0.0.1:7000  nixl, tcp  leads rollouts/0, rollouts/1, rollouts/2, rollouts/3 and 2 more"
        "  follows rollouts/7  (this one)",
        "bb  tcp://10.0.0.2:7000  tcp",
        "coordinator: etcd at 10.0.0.9:2379, answers",
    ]
    away = found | {"coordination": {"coordinator": "etcd", "answers": False}, "read_bytes": {"nixl": 2048, "tcp": 0}}
    assert members_text(away).splitlines()[2:] == [
        "coordinator: etcd, does not answer: members stay, and none can join",
        "read from others: 2.0 KiB by nixl, 0 B by tcp",
    ]


def test_while_no_coordinator_is_known_it_says_why() -> None:
    why = "none: no coordinator is known: of the others tcp://10.0.0.1:7000 do not answer"
    found = {"members": {"aa": ONE}, "coordination": {"coordinator": why, "answers": False}}
    assert members_text(found).splitlines()[1:] == [f"coordinator: {why}"]
