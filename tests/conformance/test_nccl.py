"""The transport over torch.distributed: by gloo between host memories, and by NCCL where there are two GPUs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from dataplane.testing import TransportSuite
from dataplane.testing.transports import MIB, Shelf, Target, noise, until
from dataplane.transport.base import Transport, TransportError
from dataplane.transport.nccl import Nccl, OnDevice

KILLED = """
import asyncio, os, sys, torch
from dataplane.transport.nccl import Nccl, OnDevice

async def serve():
    transport = Nccl("127.0.0.1", device="cpu")
    await transport.start()
    for _ in range(2):
        ticket = transport.offer(OnDevice.of(torch.ones(256 << 20, dtype=torch.uint8)))
        print(transport.address, ticket.hex(), flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


class TestGloo(TransportSuite):
    def made(self) -> Transport:
        return Nccl("127.0.0.1", device="cpu")

    async def test_from_a_tensor_into_a_tensor(self, server: Nccl, reader: Nccl) -> None:
        content = noise(9 * MIB)
        target = torch.zeros(9 * MIB, dtype=torch.uint8)
        for chosen in (None, [(0, 5), (7, 100_000), (5 * MIB, 9 * MIB)]):
            ticket = server.offer(OnDevice.of(torch.from_numpy(content)))
            target.zero_()
            await reader.read(server.address, ticket, target, 10.0, chosen)  # type: ignore[arg-type]
            expected = np.zeros_like(content)
            for start, stop in chosen or [(0, len(content))]:
                expected[start:stop] = content[start:stop]
            assert np.array_equal(target.numpy(), expected)
            await server.withdraw(ticket)

    @pytest.mark.long
    async def test_an_owner_that_is_stopped_and_one_that_is_killed(
        self, reader: Transport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While it is read: the reader is told at once, or when its time is over."""
        monkeypatch.setattr("dataplane.transport.nccl._STEP_S", 1.0)  # for which closing waits
        server = subprocess.Popen([sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
        try:
            assert server.stdout is not None
            for how in (signal.SIGSTOP, signal.SIGKILL):
                address, ticket = server.stdout.readline().split()
                target = Target(256 * MIB)
                reading = asyncio.create_task(reader.read(address, bytes.fromhex(ticket), target.memory, 2.0))
                await until(lambda target=target, reading=reading: target.begun() or reading.done())
                os.kill(server.pid, how)
                async with asyncio.timeout(60):
                    with pytest.raises(TransportError):
                        await reading
                target.bytes[:] = 0xEE
                os.kill(server.pid, signal.SIGCONT)
            await reader.aclose()
            assert target.blank()
        finally:
            server.kill()
            server.wait()
            server.stdout.close()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")
@pytest.mark.leaks(reason="a CUDA context keeps threads and descriptors for as long as the process lives")
@pytest.mark.long
class TestNccl(TransportSuite):
    @pytest.fixture(autouse=True)
    def devices(self) -> None:
        self._devices = itertools.cycle(["cuda:0", "cuda:1"])

    def made(self) -> Transport:
        return Nccl("127.0.0.1", device=next(self._devices))

    async def test_it_reads_from_itself(self, server: Transport, shelf: Callable[..., Shelf]) -> None:
        """NCCL takes no two ranks of one GPU: the error says so, and nothing hangs."""
        with pytest.raises(TransportError):
            await self.read(server, server, server.offer(shelf(64).memory), 64)
