"""Placement by rendezvous hashing: the same for all, evenly, and moving no more than must."""

from __future__ import annotations

import random

import numpy as np

from dataplane.cluster.placement import Placement

NODES = [bytes([i]) * 8 for i in range(16)]
GROUPS: list[str | int] = [*(f"prompt-{i}" for i in range(4000)), *range(4000)]


def test_all_who_know_the_same_nodes_agree_whatever_their_order() -> None:
    shuffled = NODES.copy()
    random.Random(3).shuffle(shuffled)
    one, other = Placement(NODES), Placement(shuffled)
    assert (one.winners("rollouts", GROUPS) == other.winners("rollouts", GROUPS)).all()
    assert one.winner("rollouts", 7) == one.nodes[int(one.winners("rollouts", [7])[0])]


def test_each_node_has_about_as_many_groups() -> None:
    counts = np.bincount(Placement(NODES).winners("rollouts", GROUPS), minlength=len(NODES))
    mean = len(GROUPS) / len(NODES)
    assert (abs(counts - mean) < 5 * np.sqrt(mean)).all()  # binomial, five deviations


def test_a_text_and_a_number_are_not_the_same_group() -> None:
    placement = Placement(NODES)
    texts = placement.winners("rollouts", [str(i) for i in range(4000)])
    assert (texts == placement.winners("rollouts", range(4000))).mean() < 0.1


def test_only_what_a_leaver_had_moves() -> None:
    before, after = Placement(NODES), Placement(NODES[1:])
    was = [before.nodes[at] for at in before.winners("rollouts", GROUPS)]
    now = [after.nodes[at] for at in after.winners("rollouts", GROUPS)]
    moved = [a != b for a, b in zip(was, now, strict=True)]
    assert moved == [node == NODES[0] for node in was]
