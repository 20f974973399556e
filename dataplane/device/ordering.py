"""What a caller's device has still to do before tensors may be read elsewhere: by another thread, on another stream.

A CUDA stream is current for a thread. A plane's calls run in other threads than the caller's, whose current stream is
another; to read there what the caller's stream has yet to compute would give bytes of before. So the caller's streams
are noted when the call begins (`called`), and planning runs with them as its current ones (`as_called`). Where planning
meets a tensor on a device, it marks the moment (`Mark`); who reads the tensor waits for the mark.

Before CUDA was used in this process, there is nothing to note, and nothing is imported.
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
    """Tasks made within are those of a call by this thread: `noted` gives its streams there."""
    before = _called.set(streams())
    try:
        yield
    finally:
        _called.reset(before)


def noted() -> tuple[Any, ...]:
    """The streams of who called; those of this thread, where that was not said."""
    return _called.get() or streams()


@contextmanager
def as_called(noted: Iterable[Any]) -> Iterator[None]:
    """Have these streams as this thread's current ones. Those that are so already are left alone: to set the stream of
    a device that this process does not use would make a context there, of some hundred megabytes."""
    with ExitStack() as stack:
        for stream in noted:
            import torch

            if torch.cuda.current_stream(stream.device) != stream:
                stack.enter_context(torch.cuda.stream(stream))
        yield


class Mark(msgspec.Struct, frozen=True, eq=False):
    """All that the current streams of a thread had been given when the mark was made."""

    events: tuple[Any, ...] = ()

    @classmethod
    def of(cls, devices: Iterable[Any]) -> Mark:
        """The moment on these devices: of those that are CUDA's."""
        import torch

        events = []
        for device in sorted({device for device in devices if device.type == "cuda"}, key=str):
            event = torch.cuda.Event(blocking=True)  # whoever waits on the host sleeps
            event.record(torch.cuda.current_stream(device))
            events.append(event)
        return cls(tuple(events))

    def wait(self) -> None:
        """Return once all of that is done. Blocks this thread."""
        for event in self.events:
            event.synchronize()


NOTHING = Mark()
"""What is ready already."""
