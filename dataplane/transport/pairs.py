"""Two ranks of torch.distributed, one at each end of a socket: NCCL between GPUs, gloo between hosts' memories.

What the ends of a group have to tell each other (where one listens, the number of a communicator) goes over the socket
that is there anyway, as a store of torch's, until both have heard a byte from the other by the group. Then the socket
is used for other things, and the store answers from what it knows.

Invariants: nothing of a group that was broken off writes to memory any more.

gloo knows no wait that can be given up: one that takes too long closes all connections of its group, and that is how it
is broken off (torch 2.13: `abort` wakes nobody). Then whoever waits for a message wakes, unless some of it has come:
who waits for its rest is not told, and sees the end of its own patience. So waits have one.

Of NCCL torch would end the whole process where a peer dies before it is told to break off; its settings for that are
read when a group is made, and set for that moment alone.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import msgspec

from dataplane.transport.channels import tell, told

_CONNECT_S, _LOOK_S = 10.0, 20e-6
_NCCL_S = 60.0  # of a message: whoever waits gives up before that, and breaks the group off
_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""The settings a group is made with: an error breaks it off, and ends nothing else; nobody watches whether its
threads live."""

Wait = Callable[[float], None]
"""Returns once it is done; raises OSError or EOFError if it cannot be, or is not after so many seconds."""

_making = threading.Lock()


class Pair(ABC):
    """One end of a group of two. Methods raise OSError, and are called by one thread, except `abort`."""

    @abstractmethod
    def send(self, tensor: Any) -> Wait:
        """Begin to send a uint8 tensor, which must not change until the returned function has returned."""

    @abstractmethod
    def receive(self, into: Any) -> Wait:
        """Begin to fill a uint8 tensor: it is filled once the returned function has returned."""

    @abstractmethod
    def abort(self) -> None:
        """Break off, in any thread, also while another waits. Idempotent."""

    def greet(self, first: bool) -> None:
        """Have each end receive a byte of the other, one after the other. Raises OSError."""
        import torch

        mine, theirs = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        for sends in (first, not first):
            wait = self.send(mine) if sends else self.receive(theirs)
            wait(_CONNECT_S)
        if theirs.item() != 1:
            raise OSError("the other end of a group says something else")


def joined(stream: socket.socket, rank: int, device: Any) -> Pair:
    """The group of the two ends of this socket: over NCCL if `device` is a CUDA device, over gloo if it is the
    host's memory. Both ends call this at the same time. Raises OSError, EOFError."""
    store = _store(stream)
    with errors():
        pair: Pair = _Nccl(store, rank, device) if device.type == "cuda" else _Gloo(store, rank, stream)
        try:
            pair.greet(rank == 0)
        except BaseException:
            pair.abort()
            raise
    store.settled = True
    return pair


@contextmanager
def errors() -> Iterator[None]:
    """What torch raises, as what a channel may raise."""
    try:
        yield
    except (OSError, EOFError, ValueError):
        raise
    except RuntimeError as error:  # the base of torch.distributed's
        raise OSError(f"torch.distributed: {str(error).splitlines()[0][:300]}") from error


class _Gloo(Pair):
    """Between host memories, by gloo's sockets: it listens at the address of the channel's socket."""

    def __init__(self, store: Any, rank: int, stream: socket.socket) -> None:
        import torch.distributed as dist

        kind = dist.ProcessGroupGloo
        options = kind._Options()
        options._devices = [kind.create_device(hostname=stream.getsockname()[0])]
        options._timeout = timedelta(seconds=_CONNECT_S)
        options._threads = 1
        self._group: Any = kind(store, rank, 2, options)
        self._peer = 1 - rank
        self._over = threading.Lock()

    def send(self, tensor: Any) -> Wait:
        return self._begun(self._group.send([tensor], self._peer, 0))

    def receive(self, into: Any) -> Wait:
        return self._begun(self._group.recv([into], self._peer, 0))

    def _begun(self, work: Any) -> Wait:
        return lambda within_s: _waited(work, within_s)

    def abort(self) -> None:
        import torch

        with self._over, suppress(RuntimeError):
            work = self._group.recv([torch.empty(1, dtype=torch.uint8)], self._peer, 1)
            work.wait(timedelta(milliseconds=1))


class _Nccl(Pair):
    """Between GPUs. Host memory is copied to the device to be sent, and from it once it has come."""

    def __init__(self, store: Any, rank: int, device: Any) -> None:
        import torch
        import torch.distributed as dist

        self._device = device
        self._peer = 1 - rank
        self._aborted = False
        self._ending = threading.Lock()
        with torch.cuda.device(device), _environment(_NCCL):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timedelta(seconds=_NCCL_S)
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, tensor: Any) -> Wait:
        import torch

        with torch.cuda.device(self._device):
            there = tensor if tensor.is_cuda else tensor.to(self._device)
            work = self._group.send([there], self._peer, 0)
        return lambda within_s: self._done(work, there, within_s)

    def receive(self, into: Any) -> Wait:
        import torch

        with torch.cuda.device(self._device):
            there = into if into.is_cuda else torch.empty(into.shape, dtype=into.dtype, device=self._device)
            work = self._group.recv([there], self._peer, 0)

        def done(within_s: float) -> None:
            self._done(work, there, within_s)
            if there is not into:
                into.copy_(there)

        return done

    def _done(self, work: Any, _: Any, within_s: float) -> None:
        """Poll on the host until the device is done: a wait of CUDA has no end. What a broken-off communicator left
        is not taken for bytes."""
        import torch

        until = time.monotonic() + within_s
        with torch.cuda.device(self._device):
            work.wait()  # which has the current stream wait, and not this thread
            done = torch.cuda.current_stream().record_event()
        while not self._aborted and not done.query():
            if time.monotonic() > until:
                raise TimeoutError("a message takes too long")
            time.sleep(_LOOK_S)
        if self._aborted:
            raise EOFError("the group was broken off")

    def abort(self) -> None:
        with self._ending:
            if not self._aborted:
                self._aborted = True
                with suppress(RuntimeError):
                    self._group.abort()


def _waited(work: Any, within_s: float) -> None:
    with errors():
        work.wait(timedelta(seconds=within_s))


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """The process's environment with these settings, unless it has its own."""
    with _making:
        added = {name: value for name, value in settings.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


def _store(stream: socket.socket) -> Any:
    """A store of torch between the two ends of a socket: what one sets, the other receives. Each key is set once."""
    import torch.distributed as dist

    class Told(dist.Store):  # type: ignore[misc]  # torch is typed as Any here
        def __init__(self) -> None:
            super().__init__()
            self.settled = False
            self._known: dict[str, bytes] = {}
            self._lock = threading.RLock()

        def set(self, key: str, value: Any) -> None:
            encoded = value.encode() if isinstance(value, str) else bytes(value)
            with self._lock:
                self._known[key] = encoded
                if not self.settled:
                    tell(stream, msgspec.msgpack.encode((key, encoded)))

        def get(self, key: str) -> bytes:
            with self._lock:
                while key not in self._known:
                    if self.settled:
                        raise KeyError(key)
                    name, value = msgspec.msgpack.decode(told(stream), type=tuple[str, bytes])
                    self._known[name] = value
                return self._known[key]

        def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                self.get(key)

        def check(self, keys: list[str]) -> bool:
            with self._lock:
                return all(key in self._known for key in keys)

        def clone(self) -> Any:
            return self

        def has_extended_api(self) -> bool:
            return False

    return Told()
