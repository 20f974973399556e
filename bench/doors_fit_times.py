"""Records the times of a run's calls of TransferQueue in files of the directory `FIT_TIMES`, for `bench.doors_fit`.

Recorded are the calls of the trainer, the agent loops and `tqbridge` in the ranks, by a clock that all processes share.
Of an awaited call, two times count as storage's: that in which the event loop runs the call or a task started by it,
and that in which the loop is idle. While the loop computes something else, such as images of other trajectories, it
does not wait for storage. Of a call that blocks its thread, the whole time counts.

A call's line is `{"name", "partition", "start", "end", "spans"}`, where `spans` are pairs of times. An awaited call has
the `bytes` of its fields, and `idle`, the seconds of its spans with an idle loop. A blocking call has `private`, the
bytes that it added to this process's private memory, and `processor`, the processor time of the whole process during
the call. `kv_clear` has `stored`, the bytes in the node at its start. A line `{"threads", "at"}` has the processor time
of storage's threads until then, in a process that awaits.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import threading
import time
import types
from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from PIL.Image import Image
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import transferqueue_utils

from dataplane.integrations import process

_CALLS = ("kv_put", "kv_batch_put", "kv_batch_get", "kv_list", "kv_clear")
_BRIDGE = ("_meta_to_realdata", "_update_meta_with_output", "kv_batch_meta2batch_meta", "batch_meta2kv_batch_meta")
_THREADS = ("dataplane", "ZMQbg")  # prefixes of the names of storage's threads
_EVERY_S = 0.2

Spans = list[tuple[float, float]]

_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_spans: ContextVar[Spans | None] = ContextVar("spans", default=None)
_waits: dict[int, Spans] = {}
_idle: dict[int, float] = {}
_told_at = 0.0


def wrap() -> None:
    """Record each call from now on, also calls of functions that `init` replaces."""
    for name in _BRIDGE:
        setattr(transferqueue_utils, name, timed(getattr(transferqueue_utils, name)))
    _wrap_calls()
    init = tq.init

    @functools.wraps(init)
    def initialised(*arguments: Any, **named: Any) -> Any:
        made = init(*arguments, **named)
        _wrap_calls()
        return made

    tq.init = initialised


def _wrap_calls() -> None:
    for name in _CALLS:
        for each in (name, f"async_{name}"):
            call = getattr(tq, each)
            if not hasattr(call, "timed"):
                setattr(tq, each, timed(call))


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that each call is recorded."""
    name = function.__name__

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        stored = _stored() if name == "kv_clear" else None
        before, processor, began = private(), time.process_time(), time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            ended = time.monotonic()
            processor = time.process_time() - processor
            spans = [(began, ended)]
            line = {"spans": spans, "private": private() - before, "stored": stored, "processor": processor}
            _write(name, began, ended, named.get("partition_id"), line)

    @functools.wraps(function)
    async def call_async(*arguments: Any, **named: Any) -> Any:
        _watch(asyncio.get_running_loop())
        spans: Spans = []
        began = time.monotonic()
        _waits[id(spans)] = spans
        try:
            return await _stepped(function(*arguments, **named), spans)
        finally:
            del _waits[id(spans)]
            more = {"spans": spans, "idle": _idle.pop(id(spans), 0.0), "bytes": nbytes(named.get("fields"))}
            _write(name, began, time.monotonic(), named.get("partition_id"), more)
            _tell_threads()

    made = call_async if inspect.iscoroutinefunction(function) else call
    made.timed = True  # type: ignore[attr-defined]
    return made


@types.coroutine
def _stepped(coroutine: Coroutine[Any, Any, Any], spans: Spans) -> Generator[Any, Any, Any]:
    """Await the coroutine, and add the times in which it runs to `spans`."""
    resume: Callable[[Any], Any] = coroutine.send
    given: Any = None
    while True:
        outer, began = _spans.get(), time.monotonic()
        _spans.set(spans)
        try:
            wanted = resume(given)
        except StopIteration as ended:
            return ended.value
        finally:
            _spans.set(outer)
            spans.append((began, time.monotonic()))
        try:
            given = yield wanted
            resume = coroutine.send
        except BaseException as error:
            resume, given = coroutine.throw, error


async def _step(coroutine: Coroutine[Any, Any, Any], spans: Spans) -> Any:
    return await _stepped(coroutine, spans)


def _task(loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
    """A task. If a call starts it, its steps are added to the call's spans."""
    spans = _spans.get()
    return asyncio.Task(coroutine if spans is None else _step(coroutine, spans), loop=loop, **named)


def _watch(loop: Any) -> None:
    """Let `_task` create the loop's tasks, and add the loop's idle times to an awaited call."""
    if loop.get_task_factory() is _task:
        return
    loop.set_task_factory(_task)
    select = loop._selector.select

    def waited(timeout: float | None = None) -> Any:
        began = time.monotonic()
        found = select(timeout)
        if _waits and (timeout is None or timeout > 0):
            of, ended = next(iter(_waits)), time.monotonic()  # of one call only: the spans of all calls are united
            _waits[of].append((began, ended))
            _idle[of] = _idle.get(of, 0.0) + ended - began
        return found

    loop._selector.select = waited


def nbytes(value: Any) -> int:
    """Bytes of the tensors, images and bytes in a value, and the characters of its texts."""
    if isinstance(value, torch.Tensor):
        whole = value.values() if value.is_nested else value
        return int(whole.numel() * whole.element_size())
    if isinstance(value, Image):
        return value.width * value.height * len(value.getbands())
    if isinstance(value, bytes | str):
        return len(value)
    if isinstance(value, NonTensorStack | NonTensorData | np.ndarray):
        return nbytes(value.tolist())
    if isinstance(value, dict | TensorDict):
        return sum(map(nbytes, value.values()))
    return sum(map(nbytes, value)) if isinstance(value, list | tuple) else 0


def private() -> int:
    """Resident bytes of this process without files and shared memory."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE


def _stored() -> int | None:
    """Bytes that the node stores, without reservations; None if the storage is not the data plane."""
    client = tq.get_client()
    if not type(getattr(client, "storage_manager", client)).__module__.startswith("dataplane."):
        return None
    stats = process.plane().stats()
    return int(stats.memory_used - stats.reserved_bytes)


def _tell_threads() -> None:
    """Record the processor time of storage's threads, at most every `_EVERY_S` seconds."""
    global _told_at
    if time.monotonic() < _told_at + _EVERY_S:
        return
    _told_at = time.monotonic()
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    taken = 0
    for task in Path("/proc/self/task").iterdir():
        try:
            name = names.get(int(task.name)) or (task / "comm").read_text()
            if name.startswith(_THREADS):
                taken += sum(map(int, (task / "stat").read_text().rpartition(")")[2].split()[11:13]))  # user, system
        except FileNotFoundError:  # the thread has ended
            continue
    _add({"threads": taken / _TICKS, "at": _told_at})


def _write(name: str, began: float, ended: float, partition: str | None, more: dict[str, Any]) -> None:
    _add({"name": name.removeprefix("async_"), "partition": partition, "start": began, "end": ended, **more})


def _add(line: dict[str, Any]) -> None:
    with Path(os.environ["FIT_TIMES"], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
