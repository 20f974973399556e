"""Bytes by point-to-point messages of torch.distributed: over NCCL between GPUs, over gloo where there is none.

A channel is a group of two ranks, made over its socket (`transport.pairs`). Long ranges go as they lie, short ones
packed together; a few messages are under way at a time. The reader says on the socket that it has one; so the owner
waits there, where it hears at once that the other end has gone, and never for a message. Who reads has another thread
wait for each message, and looks at the socket meanwhile. When a read ends early, both ends let the message that is
under way end, for a moment, before they break the group off: gloo does not wake who waits for the rest of one.

Memory may be on a device (`OnDevice`), and so may the tensor that is read into: then bytes go from GPU to GPU. Host
memory is copied to the device and from it. A process gives by one channel at a time to each GPU, and takes by one:
NCCL's documentation ("Thread Safety") calls it unsafe to issue operations of several communicators of a device at
once.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from dataplane.device.memory import bytes_tensor
from dataplane.device.naming import device_of
from dataplane.errors import Misuse
from dataplane.threads import Pool
from dataplane.transport.base import Memory
from dataplane.transport.channels import ChannelTransport, DataChannel, agree, exactly, mapped, tell, told
from dataplane.transport.messages import messages
from dataplane.transport.offers import Offered
from dataplane.transport.pairs import Pair, Wait, joined

_HAVE = b"\x04"  # said by the reader on the socket for each message
_UNDER_WAY = 4  # messages
_THREADS = 256
_STEP_S = 5.0  # for a message
_END_S = 0.3  # for a message that is under way when a read ends early


@dataclass(frozen=True, slots=True)
class OnDevice(Memory):
    """The bytes of a one-dimensional uint8 tensor, which may be on a device. They are complete."""

    tensor: Any = None

    @classmethod
    def of(cls, tensor: Any) -> OnDevice:
        """The bytes of that tensor."""
        return cls(-1, 0, len(tensor), tensor)


class Nccl(ChannelTransport):
    """The transport. `device`: what sends and receives, a CUDA device or "cpu"; if None, the current CUDA device if
    this torch has NCCL, else the host."""

    name = "nccl"

    def __init__(self, host: str, told: str = "", device: Any = None) -> None:
        super().__init__(host, told)
        self._wanted = device
        self._device: Any = None
        self._waits = Pool(_THREADS, "dataplane-nccl-wait")

    def _prepare(self) -> None:
        try:
            import torch.distributed as dist
        except ImportError as error:
            raise OSError(f"torch is not installed: pip install rollout-dataplane[torch] ({error})") from error
        if not dist.is_available() or not dist.is_gloo_available():
            raise OSError("this torch has no torch.distributed with gloo")
        try:
            self._device = device_of(_device() if self._wanted is None else self._wanted)
        except Misuse as error:
            raise OSError(str(error)) from None
        if self._device.type == "cuda" and not dist.is_nccl_available():
            raise OSError(f"this torch has no NCCL for {self._device}")

    def _channel(self, stream: socket.socket) -> DataChannel:
        return _NcclChannel(stream, self._device, self._waits)

    async def aclose(self) -> None:
        await super().aclose()
        await self._waits.aclose()


def _device() -> str:
    import torch
    import torch.distributed as dist

    return "cuda" if torch.cuda.is_available() and dist.is_nccl_available() else "cpu"


_making = threading.Lock()
_turns: dict[Any, tuple[threading.Lock, threading.Lock]] = {}


def _turn(device: Any, which: int) -> AbstractContextManager[Any]:
    """The lock held while this device sends (0) or receives (1); none for the host's memory."""
    if device.type == "cpu":
        return nullcontext()
    with _making:
        return _turns.setdefault(device, (threading.Lock(), threading.Lock()))[which]


class _NcclChannel(DataChannel):
    def __init__(self, stream: socket.socket, device: Any, waits: Pool) -> None:
        import torch

        agree(stream, f"{torch.__version__} {'nccl' if device.type == 'cuda' else 'gloo'}")
        mine = secrets.token_bytes(8)
        tell(stream, mine)
        self._stream = stream
        self._device = device
        self._waits = waits
        self._pair: Pair = joined(stream, int(mine > told(stream)), device)

    def give(self, offered: Offered, ranges: Sequence[tuple[int, int]]) -> None:
        under_way: deque[Wait] = deque()
        with _turn(self._device, 0), _tensor(offered.memory) as source:
            try:
                for message in messages(ranges):
                    if len(under_way) == _UNDER_WAY:
                        self._had(under_way)
                    under_way.append(self._pair.send(_gathered(source, message)))
                while under_way:
                    self._had(under_way)
            except BaseException:
                with suppress(OSError, EOFError):
                    under_way.popleft()(_END_S)
                raise

    def _had(self, under_way: deque[Wait]) -> None:
        """Return once the reader has the first of these messages."""
        if exactly(self._stream, len(_HAVE)) != _HAVE:
            raise ValueError("the reader says something else")
        under_way.popleft()(_STEP_S)

    def take(self, into: Any, ranges: Sequence[tuple[int, int]]) -> None:
        with _turn(self._device, 1):
            self._take(into, ranges)

    def _take(self, into: Any, ranges: Sequence[tuple[int, int]]) -> None:
        import torch

        target = into if isinstance(into, torch.Tensor) else bytes_tensor(np.frombuffer(into, np.uint8))
        under_way: deque[tuple[Wait, Any, list[tuple[int, int]]]] = deque()
        coming = messages(ranges)
        while True:
            for message in islice(coming, _UNDER_WAY - len(under_way)):
                buffer = _place(target, message)
                under_way.append((self._pair.receive(buffer), buffer, message))
            if not under_way:
                if target.is_cuda:  # the scatter may still run on this thread's stream
                    torch.cuda.current_stream(target.device).synchronize()
                return
            done, buffer, message = under_way.popleft()
            self._wait(done)
            self._stream.sendall(_HAVE)
            if len(message) > 1:
                _scatter(target, message, buffer)

    def _wait(self, done: Wait) -> None:
        """Have a thread wait, and watch the socket meanwhile. Raises EOFError if either end closes it."""
        told, tells = socket.socketpair()
        with told:
            waiting = self._waits.submit(_waited, done, tells)
            poller = select.poll()
            poller.register(self._stream, select.POLLRDHUP)
            poller.register(told, select.POLLIN)
            if not any(fd == told.fileno() for fd, _ in poller.poll(_STEP_S * 1000)):
                wait([waiting], _END_S)
                raise EOFError("the other end has gone")
            waiting.result()

    def close(self) -> None:
        self._pair.abort()


def _waited(done: Wait, tells: socket.socket) -> None:
    """In a thread: wait, and signal the end of that."""
    with tells:
        done(_STEP_S)


@contextmanager
def _tensor(memory: Memory) -> Iterator[Any]:
    """The memory as a tensor."""
    if isinstance(memory, OnDevice):
        yield memory.tensor
        return
    with mapped(memory) as source:
        yield bytes_tensor(source[: memory.size])


def _gathered(source: Any, message: list[tuple[int, int]]) -> Any:
    """The bytes of a message: not copied if they are one range."""
    parts = [source[start:stop] for start, stop in message]
    if len(parts) == 1:
        return parts[0]
    import torch

    return torch.cat(parts)


def _place(target: Any, message: list[tuple[int, int]]) -> Any:
    """Where a message is received: in its place if it is one range."""
    if len(message) == 1:
        return target[message[0][0] : message[0][1]]
    return target.new_empty(sum(stop - start for start, stop in message))


def _scatter(target: Any, message: list[tuple[int, int]], buffer: Any) -> None:
    at = 0
    for start, stop in message:
        target[start:stop].copy_(buffer[at : at + stop - start])
        at += stop - start
