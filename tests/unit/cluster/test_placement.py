"""Placement by rendezvous hashing: the same for all, evenly, and moving no more than must."""

from __future__ import annotations

from dataplane.cluster.placement import Rendezvous

NODES = [bytes([i]) * 8 for i in range(16)]
GROUPS: list[str | int] = [*(f"prompt-{i}" for i in range(4000)), *range(4000)]


def test_only_placements_of_a_leaving_node_move() -> None:
    before, after = Rendezvous(NODES), Rendezvous(NODES[1:])
    was = [before.nodes[at] for at in before.winners("rollouts", GROUPS)]
    now = [after.nodes[at] for at in after.winners("rollouts", GROUPS)]
    moved = [a != b for a, b in zip(was, now, strict=True)]
    assert moved == [node == NODES[0] for node in was]
