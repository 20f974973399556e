"""Columns that a process of one host keeps and others of another read: by way of the arena or, where they name a
device, from process to process. On the host's memory, over gloo; `tests/gpu` has what needs CUDA devices."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import dataplane as dp
from tests.integration.keepers import ROWS, same
from tests.integration.test_hosts import Host, together
from tests.integration.test_keeping import columns, produce
from tests.processes import MIB, Worker, eventually


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Host]]:
    directory = tmp_path_factory.mktemp("hosts")
    with Host(directory / "one", memory="64MiB") as one, Host(directory / "two", one, memory="64MiB") as two:
        with dp.connect(one.address) as first, dp.connect(two.address) as second:
            together(first, second)  # and what that takes has begun
        yield [one, two]


@pytest.fixture
def planes(hosts: list[Host]) -> Iterator[tuple[Any, Any]]:
    with dp.connect(hosts[0].address) as first, dp.connect(hosts[1].address) as second:
        together(first, second)
        yield first, second


def fetched(hosts: list[Host]) -> int:
    """Bytes that came to the second host's arena."""
    return int(hosts[1].facts()["fetched"])


def test_who_names_no_device_has_it_by_way_of_the_arena(planes: tuple[Any, Any], hosts: list[Host]) -> None:
    first, second = planes
    ref, before = first.put(columns(1), device="keep"), fetched(hosts)
    assert same(second.get(ref), 1)
    assert fetched(hosts) - before >= ref.select("x").nbytes
    assert same(first.get(ref), 1)
    second.free(ref)
    with pytest.raises(dp.Freed):
        first.get(ref)


def test_who_names_a_device_has_it_from_the_process_that_keeps_it(planes: tuple[Any, Any], hosts: list[Host]) -> None:
    _, second = planes
    before, used = fetched(hosts), hosts[0].facts()["fetched"]
    with Worker(produce, hosts[0].address) as producer:
        refs = [producer.ask(seed) for seed in (1, 2)]
        for seed, ref in enumerate(refs, 1):
            batch = second.get(ref, device="cpu")
            assert same(batch, seed)
            part = second.get(ref[2:5].select("x", "ids"), device="cpu")
            assert torch.equal(part["x"].torch(), columns(seed)["x"][2:5])
            assert part["ids"].to_list() == [row.tolist() for row in columns(seed)["ids"][2:5]]
            part["x"].torch().zero_()  # the reader's own
            assert same(second.get(ref, device="cpu"), seed)
        both = second.get(dp.concat(refs)[[ROWS + 3, 0, ROWS + 3]], device="cpu")
        assert torch.equal(both["x"].torch(), torch.stack([columns(2)["x"][3], columns(1)["x"][0], columns(2)["x"][3]]))
        assert fetched(hosts) - before < MIB  # of text alone
        assert hosts[0].facts()["fetched"] == used

        second.free(refs[0][4:5])
        with pytest.raises(dp.Freed):
            second.get(refs[0][3:6], device="cpu")
        assert len(second.get(refs[0][:4], device="cpu")) == 4
        second.free(refs[0])
        with pytest.raises(dp.Freed):
            second.get(refs[0], device="cpu")
        assert same(batch, 2)

        producer.kill(signal.SIGKILL)

        def gone() -> bool:
            try:
                second.get(refs[1], device="cpu")
            except dp.OwnerDied as error:
                return "has gone" in str(error)
            return False

        eventually(gone, "the node noticed")
