"""Seeds of streams and of tables: every invariant holds in each."""

from __future__ import annotations

import pytest

from tests.simulation.stream.run import streams
from tests.simulation.test_seeds import ALL, FEW, outcomes

CHUNK = 150


@pytest.mark.timeout(600)  # of a machine with a load of 20; alone, a chunk of streams takes 15 s
@pytest.mark.parametrize("first", range(0, FEW, CHUNK))
@pytest.mark.parametrize(("kind", "commands"), [("stream", 50), ("table", 40)])
def test_every_invariant_of_streams_and_tables_holds(kind: str, commands: int, first: int) -> None:
    """And runs are dense: most change leaders and fill logs, few lose a partition in memory with all its replicas."""
    found = outcomes(ALL[kind], first, CHUNK)
    assert sum(outcome.epochs for outcome in found) > 4 * CHUNK
    assert sum(outcome.commands for outcome in found) > commands * CHUNK
    assert sum(outcome.lost for outcome in found) < 0.05 * CHUNK
    assert {outcome.plan.durable for outcome in found} == {True, False}
    assert {streams(outcome.plan.seed) for outcome in found} == {1, 2, 3}
