"""Collectives of ranks on several hosts, here nodes of one machine: what each host reads, what crosses each link."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import dataplane as dp
from tests.integration.ranks import Outcome, Ranks
from tests.integration.test_hosts import Host, together

pytestmark = pytest.mark.usefixtures("with_torch")

SIZE = 4
HOST = (0, 0, 1, 1)  # of each rank
CONTROL = 64 << 10  # bytes at most that ranks say beside the payload


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    directory = tmp_path_factory.mktemp("hosts")
    with Host(directory / "one", memory="64MiB") as one, Host(directory / "two", one, memory="64MiB") as two:
        yield [one, two]


@pytest.fixture(scope="module")
def ranks(hosts: list[Host], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(SIZE, tmp_path_factory.mktemp("ranks"), [hosts[host].address for host in HOST]) as several:
        yield several


@pytest.fixture
def planes(hosts: list[Host]) -> Iterator[tuple[Any, Any]]:
    with dp.connect(hosts[0].address) as first, dp.connect(hosts[1].address) as second:
        together(first, second)
        yield first, second


def columns(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"x": rng.random((64, 8192), np.float32), "ids": [np.arange(seed, seed + 300 * i) for i in range(64)]}


def crossed(outcomes: list[Outcome]) -> dict[tuple[int, int], int]:
    """The payload that each rank sent to each other."""
    assert not [outcome.error for outcome in outcomes if outcome.error is not None]
    links = {(rank, to): n for rank, outcome in enumerate(outcomes) for to, n in outcome.sent.items()}
    return {link: n for link, n in links.items() if n > CONTROL}


def once(sent: int, nbytes: int) -> bool:
    return nbytes <= sent <= nbytes + CONTROL


def test_a_broadcast_crosses_each_link_once_and_from_host_to_host_once(
    planes: tuple[Any, Any], hosts: list[Host], ranks: Ranks
) -> None:
    first, _ = planes
    ref = first.put(columns(1))
    before = [host.facts()["fetched"] for host in hosts]
    outcomes = ranks.call("broadcast", [None, ref, None, None])
    sent = crossed(outcomes)
    assert [outcome.reads for outcome in outcomes] == [0, 1, 0, 0]
    assert [(HOST[a], HOST[b]) for a, b in sent].count((0, 1)) == 1
    assert len(sent) == SIZE - 1
    assert all(once(n, ref.nbytes) for n in sent.values()), (sent, ref.nbytes)
    assert len({to for _, to in sent}) == SIZE - 1  # and each receives it from one
    assert [host.facts()["fetched"] for host in hosts] == before  # between ranks alone


def test_rows_requested_by_several_ranks_are_fetched_once_per_host(
    planes: tuple[Any, Any], hosts: list[Host], ranks: Ranks
) -> None:
    first, _ = planes
    rows = {"x": columns(4)["x"]}
    ref = first.put(rows)
    before = hosts[1].facts()["fetched"]
    outcomes = ranks.call("get", [ref[:8], ref[8:16], ref[:40], ref[20:60]])
    sent = crossed(outcomes)
    row = rows["x"][0].nbytes
    assert [outcome.read_bytes for outcome in outcomes] == [8 * row, 8 * row, 60 * row, 0]
    assert sorted(sent) == [(2, 3)]
    assert once(sent[2, 3], 40 * row)
    assert hosts[1].facts()["fetched"] - before <= rows["x"].nbytes + CONTROL  # of 80 rows that were asked for


def test_a_scatter_sends_each_rank_only_its_part(planes: tuple[Any, Any], ranks: Ranks) -> None:
    first, _ = planes
    rows = columns(3)
    sent = crossed(ranks.call("scatter", [first.put(rows).chunk(SIZE), None, None, None]))
    assert sorted(sent) == [(0, 1), (0, 2), (0, 3)]
    for (_, to), n in sent.items():
        own = slice(to * 64 // SIZE, (to + 1) * 64 // SIZE)
        assert once(n, rows["x"][own].nbytes + sum(row.nbytes for row in rows["ids"][own]))
