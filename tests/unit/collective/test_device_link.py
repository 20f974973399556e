"""Large pieces of numbers go from device to device. Gloo, whose tensors are the host's, stands in NCCL's place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from dataplane.batch.batch import Batch
from dataplane.clock import Deadline
from dataplane.collective.device_link import DeviceLink, devices_of
from dataplane.collective.exchange import Chain, move
from dataplane.collective.link import RankLink
from dataplane.collective.packing import SHORT, pack
from dataplane.errors import PeerUnavailable
from tests.unit.batch.exact import local_batch

CPU = torch.device("cpu")
ROWS = 64
COLUMNS: dict[str, Any] = {
    "pixels": np.arange(ROWS * 100_000, dtype=np.uint32).view(np.uint8).reshape(ROWS, -1),  # of several pieces
    "ids": [np.arange(i * 50, dtype=np.int64) for i in range(ROWS)],
    "few": np.arange(ROWS, dtype=np.float32),
    "text": [f"row {i}" * 2000 for i in range(ROWS)],
}


class Ranks:
    """Ranks of a group, each a thread with a link. A context manager."""

    def __init__(self, size: int) -> None:
        self._store = dist.HashStore()
        self._threads = ThreadPoolExecutor(size)
        self.size = size
        self.links = [RankLink(dist.PrefixStore("link", self._store), rank, size) for rank in range(size)]
        self.devices = self.each(self._connected)

    def _connected(self, rank: int) -> DeviceLink:
        self.links[rank].begin(Deadline.after(30))
        self.links[rank].connect()
        store = dist.PrefixStore("devices", self._store)
        return DeviceLink(dist.ProcessGroupGloo(store, rank, self.size, timeout=timedelta(seconds=30)), CPU)

    def each(self, work: Any) -> list[Any]:
        return list(self._threads.map(work, range(self.size)))

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for link in self.links:
            link.end(None)
            link._threads.shutdown()
        self._threads.shutdown()
        self.links.clear()
        self.devices.clear()


@pytest.mark.parametrize("chains", [[[1, 0, 2]], [[0, 1], [0, 2]]], ids=["broadcast", "scatter"])
def test_large_numeric_pieces_cross_between_devices_and_the_rest_between_hosts(
    monkeypatch: pytest.MonkeyPatch, chains: list[list[int]]
) -> None:
    packed = pack(local_batch(COLUMNS))
    crossed: dict[str, int] = {"host": 0, "device": 0}
    post, receive = RankLink.post, DeviceLink.receive

    def posted(link: RankLink, rank: int, data: Any, tag: int) -> None:
        crossed["host"] += len(data)
        post(link, rank, data, tag)

    def received(link: DeviceLink, rank: int, into: Any) -> Any:
        crossed["device"] += len(into)
        return receive(link, rank, into)

    monkeypatch.setattr(RankLink, "post", posted)
    monkeypatch.setattr(DeviceLink, "receive", received)

    with Ranks(3) as ranks:

        def call(rank: int) -> list[Batch]:
            own = [
                Chain(i, chain, rank, packed if chain[0] == rank else None, packed.header, CPU, ranks.devices[rank])
                for i, chain in enumerate(chains)
                if rank in chain
            ]
            move(ranks.links[rank], own)
            ranks.links[rank].flush()
            return [chain.batch() for chain in own if chain.before is not None]

        found = [batch for batches in ranks.each(call) for batch in batches]
    assert len(found) == 2
    large = COLUMNS["pixels"].nbytes + sum(row.nbytes for row in COLUMNS["ids"])
    assert crossed["device"] > 2 * large - 4 * SHORT
    assert crossed["host"] < 2 * sum(map(len, COLUMNS["text"])) + 8 * SHORT
    for batch in found:
        there = batch.to("cpu")
        assert torch.equal(there["pixels"].torch(), torch.from_numpy(COLUMNS["pixels"]))
        assert batch.to_dict() == local_batch(COLUMNS).to_dict()  # copied back from the device


def test_a_torch_error_between_pieces_becomes_peer_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after another thread has ended the group, which is what a rank that fails has the others do."""
    packed = pack(local_batch(COLUMNS))

    def closed(link: DeviceLink, rank: int, data: Any) -> None:
        raise RuntimeError("[x] NCCL communicator was aborted. More")

    def limited(link: DeviceLink, rank: int, into: Any) -> Any:
        work = receive(link, rank, into)
        return SimpleNamespace(wait=lambda: work.wait(timedelta(seconds=1)))  # gloo has no other end of it

    receive = DeviceLink.receive
    monkeypatch.setattr(DeviceLink, "receive", limited)
    monkeypatch.setattr(DeviceLink, "send_copy", closed)

    def call(rank: int) -> None:
        chain = Chain(0, [0, 1], rank, None if rank else packed, packed.header, CPU, ranks.devices[rank])
        with pytest.raises(PeerUnavailable, match="communicator was aborted" if not rank else "rank 0") as caught:
            try:
                move(ranks.links[rank], [chain])
            finally:
                if not rank:
                    ranks.links[rank].interrupt()  # as the end of its call does
        assert caught.value.address == f"rank {1 - rank}"

    with Ranks(2) as ranks:
        ranks.each(call)


def test_ranks_raise_peer_unavailable_when_their_device_links_are_aborted() -> None:
    with Ranks(2) as ranks:

        def call(rank: int) -> None:
            link, devices = ranks.links[rank], ranks.devices[rank]
            with (
                pytest.raises(PeerUnavailable, match="connections between devices were closed"),
                link.between_devices(devices, [0] * rank, [1] * (1 - rank)),
            ):
                devices.abort()

        ranks.each(call)


def test_device_links_are_used_only_for_devices_with_an_nccl_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for said, expected in [("cpu:gloo,cuda:gloo", set()), ("cuda:nccl", {"cuda"}), ("cpu:gloo,cuda:nccl", {"cuda"})]:
        monkeypatch.setattr(dist, "get_backend_config", lambda group, said=said: said)
        assert devices_of(None) == expected
    link = RankLink(None, 0, 2, {"cuda"})
    assert link.devices(None) is link.devices(CPU) is None


def test_an_interrupt_ends_a_call_that_is_connecting() -> None:
    store = dist.PrefixStore("link", dist.HashStore())
    link = RankLink(store, 0, 2)
    link.begin(Deadline.after(30))
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(link.connect)
        store.wait(["0/came/0"])
        link.interrupt()
        with pytest.raises(PeerUnavailable, match="interrupted"):
            connecting.result(30)
    ranks = dist.PrefixStore("0/ranks", store)
    dist.ProcessGroupGloo(ranks, 1, 2, timeout=timedelta(seconds=30))  # ends the thread that connects
    link.end(None)
    link._threads.shutdown()
