"""When a run's processes are in calls of TransferQueue, in files of a directory (`FIT_TIMES`), for the benchmark.

A call is what the trainer, the agent loops and `tqbridge` in the ranks wait for; times are of a clock that all share.
Of a call that is awaited two things are storage's: the steps in which the event loop runs it, or a task that it began;
and the time in which that loop has nothing else to do. While the loop computes something else, as verl's processor of
images does for other trajectories, nobody waits for storage. A call that blocks its thread is storage's as a whole.

A line is `{"name", "partition", "start", "end", "spans"}`; `spans` are pairs of times. One that is awaited has the
`bytes` of its fields, and `idle`, the seconds of its spans in which the loop had nothing else to do. One that blocks
has `private`, the bytes of this process's own memory that it added, and `processor`, the processor time of the whole
process meanwhile; of `kv_clear`, `stored` is what the node holds as it begins. A line `{"threads", "at"}` has the
processor time that storage's threads of a process that awaits have taken until then.
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
_THREADS = ("dataplane", "ZMQbg")  # how the names of storage's threads begin
_EVERY_S = 0.2

Spans = list[tuple[float, float]]

_PAGE, _TICKS = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_CLK_TCK")
_spans: ContextVar[Spans | None] = ContextVar("spans", default=None)
_waits: dict[int, Spans] = {}
_idle: dict[int, float] = {}
_told_at = 0.0


def wrap() -> None:
    """Write each call from now on, also of what `init` puts in the place of TransferQueue's."""
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
    """The same function, each call of which is written."""
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
    """Await it; add when it runs to `spans`."""
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
    """A task; the steps of one that a call begins are the call's."""
    spans = _spans.get()
    return asyncio.Task(coroutine if spans is None else _step(coroutine, spans), loop=loop, **named)


def _watch(loop: Any) -> None:
    """Have the loop's tasks made by `_task`, and add when it has nothing to do to what is awaited."""
    if loop.get_task_factory() is _task:
        return
    loop.set_task_factory(_task)
    select = loop._selector.select

    def waited(timeout: float | None = None) -> Any:
        began = time.monotonic()
        found = select(timeout)
        if _waits and (timeout is None or timeout > 0):
            of, ended = next(iter(_waits)), time.monotonic()  # of one call: they are looked at together
            _waits[of].append((began, ended))
            _idle[of] = _idle.get(of, 0.0) + ended - began
        return found

    loop._selector.select = waited


def nbytes(value: Any) -> int:
    """Bytes of the tensors, images, bytes and texts that a value has."""
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
    """Bytes of this process's memory that it shares with no file and no other process's mapping."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * _PAGE


def _stored() -> int | None:
    """Bytes that the node holds for rows; None where another's storage is used."""
    client = tq.get_client()
    if not type(getattr(client, "storage_manager", client)).__module__.startswith("dataplane."):
        return None
    stats = process.plane().stats()
    return int(stats.memory_used - stats.reserved_bytes)


def _tell_threads() -> None:
    """Write what storage's threads have taken, now and then."""
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
