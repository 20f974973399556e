"""Columns that stay on a CUDA device and are read on one of another host, here nodes of one machine, over NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

import dataplane as dp
from tests.gpu.test_keeping import columns, same
from tests.integration.test_hosts import Host, together
from tests.processes import MIB, Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here"),
    pytest.mark.leaks(reason="a CUDA context keeps threads and descriptors for as long as the process lives"),
    pytest.mark.timeout(240),
]


def produce(pipe: Any, address: str) -> None:
    torch.cuda.set_device(1)
    with dp.connect(address, gpu_budget="4GiB") as plane:
        while (told := pipe.recv()) is not None:
            torch.cuda._sleep(100_000_000)
            pipe.send(plane.put(columns(told), device="keep"))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with Host(tmp_path / "one", memory="64MiB") as one, Host(tmp_path / "two", one, memory="64MiB") as two:
        yield one, two


def test_from_device_to_device(hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    with dp.connect(one.address) as first, dp.connect(two.address) as second, Worker(produce, one.address) as producer:
        together(first, second)
        before = two.facts()["fetched"]
        for seed in (1, 2, 3):
            producer.say(seed)
            ref = producer.hear(60)
            batch = second.get(ref, device="cuda:0")
            assert batch["x"].torch().device == torch.device("cuda", 0)
            assert same(batch, seed)
            second.free(ref)
            assert same(batch, seed)
        assert two.facts()["fetched"] - before < MIB
        producer.say(4)
        ref = producer.hear(60)
        assert same(second.get(ref), 4)  # on the host: by way of the arena
