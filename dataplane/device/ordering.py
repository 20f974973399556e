"""The pending work of a caller's device, before tensors are read by another thread, on another stream.

A CUDA stream is current for a thread. A plane's calls run in other threads than the caller's, with another current
stream; to read a tensor there before the caller's stream has computed it would return old bytes. So the caller's
streams are recorded at the beginning of a call (`called`), and planning runs with them as its current streams
(`as_called`). For a tensor on a device, planning records the state of its streams (`Mark`); a reader of the tensor
waits for the mark.

Before CUDA is used in this process, there is nothing to record, and nothing is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import msgspec

_called: ContextVar[tuple[Any, ...]] = ContextVar("dataplane_streams", default=())


def streams() -> tuple[Any, ...]:
    """The current stream of this thread on each CUDA device; none before the process has used CUDA."""
    torch = sys.modules.get("torch")
    initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    if torch is None or initialized is None or not initialized():  # or another thread is importing it
        return ()
    return tuple(torch.cuda.current_stream(i) for i in range(torch.cuda.device_count()))


@contextmanager
def called() -> Iterator[None]:
    """Tasks created within belong to a call by this thread: `noted` returns its streams there."""
    before = _called.set(streams())
    try:
        yield
    finally:
        _called.reset(before)


def noted() -> tuple[Any, ...]:
    """The streams of the caller; those of this thread if none were recorded."""
    return _called.get() or streams()


@contextmanager
def as_called(noted: Iterable[Any]) -> Iterator[None]:
    """Make these the current streams of this thread. Streams that are current already are not set: setting the
    stream of a device that this process does not use would create a context there, of some hundred megabytes."""
    with ExitStack() as stack:
        for stream in noted:
            import torch

            if torch.cuda.current_stream(stream.device) != stream:
                stack.enter_context(torch.cuda.stream(stream))
        yield


class Mark(msgspec.Struct, frozen=True, eq=False):
    """All work that was queued on the current streams of a thread when the mark was made."""

    events: tuple[Any, ...] = ()

    @classmethod
    def of(cls, devices: Iterable[Any]) -> Mark:
        """A mark on these devices, as far as they are CUDA's."""
        import torch

        events = []
        for device in sorted({device for device in devices if device.type == "cuda"}, key=str):
            event = torch.cuda.Event(blocking=True)  # a host thread that waits sleeps
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return cls(tuple(events))

    def wait(self) -> None:
        """Return once all of that work is done. Blocks this thread."""
        for event in self.events:
            event.synchronize()


NOTHING = Mark()
"""A mark that has nothing to wait for."""
