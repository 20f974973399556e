"""A task's rows of a stream as batches of tensors for a training loop, in place of a torch `DataLoader`.

    for batch in dataplane.loader(stream, "actor", rows=256, columns=["response_ids", "reward"]):
        step(batch)

A thread leases deliveries, reads and collates them during the previous step. The iterating thread gets the batches.

Invariants: a delivery is acked after its step, when the next batch is requested, or by `Loader.ack`. If the step is
left by `break` or an exception, its delivery and all prefetched ones are given back. At most `prefetch` deliveries are
leased beyond that of the step. No thread runs once an iteration has ended. Torch is imported only to make a tensor.

Rejected: an ack when a batch is returned, because a process that dies within the step would lose its rows; keys of rows
in `state_dict`, because only the stream knows after a crash which rows were acked.
"""

from __future__ import annotations

import asyncio
import inspect
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Literal

import msgspec

from dataplane.batch.batch import Batch
from dataplane.client import arguments
from dataplane.client import collate as collating
from dataplane.client.consuming import AtEnd, check_at_end, ended, is_old, loops, not_ready, still_leased
from dataplane.client.delivery import LEFT, reason_of
from dataplane.client.delivery import Delivery as AsyncDelivery
from dataplane.client.sync import Delivery, Stream
from dataplane.client.warn import warn
from dataplane.clock import monotonic
from dataplane.device.host_to_device import arrive, brought
from dataplane.device.memory import device_of
from dataplane.diagnosis import recorder
from dataplane.errors import Closed, DataplaneError, LeaseExpired, Misuse, NotReady
from dataplane.stream.sampler import BuiltIn, Fifo, Sampler

Collate = Callable[[Batch], Any]

TIMEOUT_S = 600.0
"""The default timeout of a batch, in seconds."""

_STATE = 1  # the version of the format of `state_dict`
_JOIN_S = 10.0
_LEAST_RENEW_S = 0.01


def loader(
    stream: Stream,
    task: str,
    *,
    rows: int,
    columns: Sequence[str],
    min_rows: int = 1,
    collate: Literal["jagged", "padded"] | Collate = "jagged",
    padding_value: Any = 0,
    sampler: Sampler | None = None,
    member: str | None = None,
    replica: int | None = None,
    replicas: int = 0,
    lease: float = 600.0,
    prefetch: int = 1,
    pin_memory: bool = False,
    device: Any = None,
    timeout: float | None = None,
    at_end: AtEnd = "warn",
) -> Loader:
    """Return an iterable of batches of a task's rows. It ends when the stream is closed and the task has no rows left.

    rows, columns, min_rows, sampler, member, replica, replicas: as for `Stream.consume`. A batch has `min_rows` to
        `rows` rows.
    collate: the form of a batch. "jagged": a dict of tensors, with ragged columns as nested tensors of the jagged
        layout (as lists of tensors if more than one dimension varies). "padded": ragged columns are [rows, longest,
        ...], with `<name>_mask`, true where there is a value. In both forms, text, bytes, struct and object columns are
        lists. A function: its result for the `Batch`, computed in a thread of the loader.
    padding_value: the value of padding, for all columns, or by column (0 for columns not named).
    lease: seconds of the lease of a delivery. When its batch is returned, at least nine tenths of the lease are left.
    prefetch: the number of batches that are fetched during a step. With 0, a batch is fetched when it is requested.
    pin_memory: whether tensors are in page-locked memory. Without CUDA there is a warning and no effect.
    device: the device of the tensors, such as "cuda", also of tensors within dicts, lists and tuples from a function.
        The loader's thread copies them on a separate CUDA stream during the previous step. Later work of the iterating
        thread's current CUDA stream waits for the copies. `pin_memory` then has no effect.
    timeout: seconds to wait for rows, counted from the request of a batch; 600 if None. Reading rows and `collate`
        do not count.
    at_end: the action at the end if rows of the task are dead letters, were dropped, or have expired: "warn" issues a
        `UserWarning`, "raise" raises Closed with the counts, "ignore" does nothing.

    Iterating raises NotReady at the deadline; LeaseExpired if a step took longer than the lease, so that its rows are
    delivered again; Closed if the plane was closed or the stream dropped; Misuse, Lost, and the errors of `collate`.
    After an error, a new iteration can begin. A loader must be iterated in the process that connected. It cannot be
    passed to torch's `DataLoader`.
    """
    how: dict[str, Any] = {"rows": rows, "columns": columns, "min_rows": min_rows, "sampler": sampler}
    how |= {"member": member, "replica": replica, "replicas": replicas}
    how["lease"] = arguments.seconds(lease, what="a lease")
    if isinstance(columns, str) or not columns:
        raise Misuse(f"columns is a list of one name or more, not {columns!r}")
    made = collating.named(collate, padding_value, columns)
    placed: dict[str, Any] = {"pin_memory": pin_memory, "device": device}
    return Loader(stream, task, collate=made, prefetch=prefetch, **placed, timeout=timeout, at_end=at_end, how=how)


class Loader:
    """An iterable of batches. Made by `dataplane.loader`.

    It has one iteration at a time. A new iteration ends the previous one, whose `next` then raises Misuse.
    """

    def __init__(
        self,
        stream: Stream,
        task: str,
        *,
        collate: Collate,
        prefetch: int,
        pin_memory: bool,
        device: Any,
        timeout: float | None,
        at_end: AtEnd,
        how: Mapping[str, Any],
    ) -> None:
        if not isinstance(stream, Stream):
            raise Misuse(f"a loader takes plane.stream(NAME) of a synchronous plane, not {type(stream).__name__}")
        stream.settings.task(task)
        if not 1 <= arguments.whole("min_rows", how["min_rows"]) <= arguments.whole("rows", how["rows"]):
            raise Misuse(f"rows is 1 or more, and min_rows 1 to rows: not {how['rows']!r} and {how['min_rows']!r}")
        if arguments.whole("prefetch", prefetch) < 0:
            raise Misuse(f"prefetch is how many batches are fetched ahead, not {prefetch}")
        self.steps = 0
        """The number of acked batches, including those of a loaded state."""
        self.rows = 0
        """The number of rows of these batches."""
        self.version: int | None = None
        """The newest policy version of these rows; None if there are none."""
        self.delivery: Delivery | None = None
        """The delivery of the batch that was returned last, with its keys, groups, versions and tags; None before the
        first batch and after the last."""
        self._stream = stream
        self._task = task
        self._collate = collate
        self._prefetch = prefetch
        self._pin_memory = pin_memory
        self._device = None if device is None else device_of(device)
        self._timeout_s = arguments.seconds(timeout, TIMEOUT_S)
        check_at_end(at_end)
        self._at_end: AtEnd = at_end
        self._how = dict(how)
        # A weak reference, so that an iteration left by `break` ends at once, and not at the next garbage collection.
        self._iteration: weakref.ref[_Iteration] | None = None

    def __repr__(self) -> str:
        return f"<loader of task {self._task!r} of stream {self._stream.name!r}, {self.steps} steps done>"

    def __iter__(self) -> Iterator[Any]:
        """Batches of the rows that the task is not done with."""
        before = None if self._iteration is None else self._iteration()
        if before is not None:
            before.end()
        iteration = _Iteration(self, self._iterate())
        self._iteration = weakref.ref(iteration)
        return iteration

    def ack(self) -> None:
        """Ack the last batch now, instead of when the next is requested. A state saved afterwards includes its step.
        Does nothing without a last batch, or if it was acked before. Raises LeaseExpired, OutcomeUnknown."""
        delivery = self.delivery
        if delivery is not None and not delivery.settled:
            delivery.ack()
            self.steps += 1
            self.rows += len(delivery)
            self.version = max([*delivery.versions, *([] if self.version is None else [self.version])])

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save with the model: the names of stream and task, the numbers of acked steps and rows,
        the newest policy version of these rows, and the settings of the sampler, or its `state_dict()` if it has one.

        The stream stores which rows were acked; this state does not. A durable stream keeps that even if every process
        is killed. A new loader, in any process and with or without this state, continues with the rows without an ack.
        Returned and prefetched rows are delivered again once their iteration, process or lease has ended. So:

        - no row is lost, and an acked row is not delivered again;
        - a batch that was returned, but not acked when the state was saved, is delivered again, although the model may
          have learned from it. To avoid this, call `ack` before saving;
        - loading an older state of the model does not reset the stream: rows acked since then are gone. To reset it, or
          if the node may be killed and the stream is not durable, save `stream.checkpoint(path)` with the model and
          this state. Then restore the stream by `plane.restore(path)`, and make a new loader of the restored stream.
        """
        return {
            "form": _STATE,
            "stream": self._stream.name,
            "task": self._task,
            "steps": self.steps,
            "rows": self.rows,
            "version": self.version,
            "sampler": _sampler_state(self._how["sampler"]),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counts and the sampler's state from a saved state. Raises Misuse if the state is invalid, or is of
        another stream, task or kind of sampler."""
        if state.get("form") != _STATE or not {"steps", "rows"} <= state.keys():
            raise Misuse(f"the state of a loader is what state_dict() returned, not {dict(state)!r}"[:400])
        saved, mine = (state.get("stream"), state.get("task")), (self._stream.name, self._task)
        if saved != mine:
            raise Misuse(f"a state of task {saved[1]!r} of stream {saved[0]!r}, for task {mine[1]!r} of {mine[0]!r}")
        self._how["sampler"] = _restored(self._how["sampler"], state.get("sampler"))
        self.steps, self.rows, self.version = int(state["steps"]), int(state["rows"]), state.get("version")

    def _iterate(self) -> Generator[Any, None, None]:
        ahead = _Ahead(self._stream, self._task, self._finished(), self._how)
        ahead.ask(self._prefetch)
        try:
            while True:
                ahead.ask(1)
                fetched = self._next(ahead)
                if fetched is None:
                    if ahead.closed is not None:
                        ended(ahead.closed, self._at_end)
                    return
                self.delivery, batch = fetched
                del fetched
                if self._device is not None:
                    batch = arrive(batch, self._device)
                yield batch
                del batch  # before the wait for the next batch, which may need its memory
                self.ack()
                self.delivery = None
        finally:
            left, self.delivery = self.delivery, None
            ahead.stop(left)

    def _next(self, ahead: _Ahead) -> tuple[Delivery, Any] | None:
        """The next delivery, with a valid lease, and its batch; None at the end. Raises as iterating does."""
        until = monotonic() + self._timeout_s
        while True:
            fetched = ahead.next(max(0.0, until - monotonic()))
            if fetched is None:
                return None
            inner = fetched[0]._inner
            try:
                if not is_old(inner._since_s, self._how) or self._stream._wait(still_leased(inner, self._how)):
                    return fetched
            except BaseException:
                ahead.fetched.put(fetched)  # the end of `ahead` gives it back
                raise
            ahead.ask(1)

    def _finished(self) -> Collate:
        """The function by which the fetching thread collates, pins and copies a batch."""
        collate, device, pinning = self._collate, self._device, self._pinning()
        if device is not None:
            return lambda batch: brought(collate(batch), device)
        if pinning is not None:
            return lambda batch: collating.pinned(collate(batch), pinning)
        return collate

    def _pinning(self) -> int | None:
        """The iterating thread's CUDA device, for which memory is pinned; None for no pinning."""
        if not self._pin_memory or self._device is not None:
            return None
        import torch

        if not torch.cuda.is_available():
            warn("pin_memory: there is no CUDA here, so nothing is pinned")
            return None
        return int(torch.cuda.current_device())


def _sampler_state(sampler: Sampler | None) -> Any:
    """The sampler's settings if built in, else its `state_dict()`; None if it has none."""
    if sampler is None or isinstance(sampler, BuiltIn):
        return None if sampler is None else msgspec.to_builtins(sampler)
    return sampler.state_dict() if hasattr(sampler, "state_dict") else None


def _restored(sampler: Sampler | None, state: Any) -> Sampler | None:
    """The sampler with the saved state. A user's sampler is changed in place. Raises Misuse if the state is of another
    kind of sampler."""
    if state is None and not isinstance(sampler, BuiltIn):
        return sampler
    if sampler is None or isinstance(sampler, BuiltIn):
        try:
            found: Sampler = msgspec.convert(state, BuiltIn)
        except msgspec.ValidationError:
            found = Fifo()
        if type(found) is not type(sampler or Fifo()):
            raise Misuse(f"a state of another sampler: {state!r}; this loader has {sampler!r}"[:400])
        return found
    if not hasattr(sampler, "load_state_dict"):
        raise Misuse(f"a state of another sampler: {state!r}; {type(sampler).__name__} has no load_state_dict"[:400])
    sampler.load_state_dict(state)
    return sampler


class _Iteration(Iterator[Any]):
    """One iteration of a loader. It ends when it is closed or garbage-collected, as a generator does."""

    def __init__(self, loader: Any, batches: Generator[Any, None, None]) -> None:
        self._inner = loader  # read by a diagnosis, to name the task
        self._batches = batches
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise Misuse("this iteration ended when another of the same loader began: make a loader for each")
        entered = recorder.enter()
        try:
            return next(self._batches)
        finally:
            recorder.leave(entered)

    def close(self) -> None:
        """End the iteration, and give back its deliveries without an ack. Idempotent."""
        self._batches.close()

    def end(self) -> None:
        """End this iteration, because another begins. Raises Misuse if a thread is in its `next`."""
        if inspect.getgeneratorstate(self._batches) == inspect.GEN_RUNNING:
            raise Misuse("a loader is iterated over by one thread at a time")
        self._ended = inspect.getgeneratorstate(self._batches) != inspect.GEN_CLOSED
        self._batches.close()


class _Ahead:
    """The thread that fetches deliveries for one iteration, as many as requested. It renews their leases until they are
    returned, and gives back the rest at the end.

    The threads communicate by queues, because a signal may leave a condition locked, but not a queue.
    """

    def __init__(self, stream: Stream, task: str, collate: Collate, how: Mapping[str, Any]) -> None:
        self._stream = stream
        self._task = task
        self._collate = collate
        self._how = how
        self._loop = next(loops)
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: fetch one; False: stop
        self.fetched: queue.SimpleQueue[tuple[Delivery, Any] | BaseException | None] = queue.SimpleQueue()
        self._stopped = False
        self._fetching: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None
        self._left: list[Delivery] = []
        self.closed: Closed | None = None
        """The error of the closed stream once the task has no rows left; None before."""
        self._held: dict[int, AsyncDelivery] = {}  # leased, and not returned yet
        self._renew_s = max(how["lease"] / 3, _LEAST_RENEW_S)
        self._renewed = monotonic()
        run = partial(recorder.context().run, self._run)  # a diagnosis attributes its requests to the iterating line
        self._thread = threading.Thread(target=run, name="dataplane-loader", daemon=True)
        self._thread.start()

    def ask(self, count: int) -> None:
        """Fetch `count` more deliveries."""
        for _ in range(count):
            self._asked.put(True)

    def next(self, timeout_s: float) -> tuple[Delivery, Any] | None:
        """The oldest fetched delivery, and its batch; None at the end of the stream. Raises NotReady if no rows are
        delivered within `timeout_s`, and errors of the thread."""
        until = monotonic() + timeout_s
        while True:
            try:
                fetched = self.fetched.get(timeout=min(self._renew_s, max(0.0, until - monotonic())))
                break
            except queue.Empty:
                if self._held:  # delivered rows are being read and collated, which does not count as waiting
                    until = max(until, monotonic() + self._renew_s)
                    with suppress(DataplaneError):
                        self._stream._wait(self._renew())
                elif monotonic() >= until:
                    inner = self._stream._inner
                    raise self._stream._wait(not_ready(inner, self._task, timeout_s, self._how)) from None
        if isinstance(fetched, BaseException):
            raise fetched
        if fetched is not None:
            self._held.pop(id(fetched[0]._inner), None)
        return fetched

    def stop(self, left: Delivery | None) -> None:
        """End the thread, which gives back the deliveries not yet returned, and `left`. Waits up to `_JOIN_S` for its
        end."""
        if left is not None:
            self._left.append(left)
        self._stopped = True
        fetching = self._fetching
        if fetching is not None:
            loop, task = fetching
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(task.cancel)
        self._asked.put(False)
        # The wait has a limit, because the garbage collector may call this in a call for which the thread waits.
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        more = True
        while self._next_asked():
            more = more and not self._stopped and self._fetch()
        self._held.clear()
        with suppress(queue.Empty):
            while True:
                fetched = self.fetched.get_nowait()
                if isinstance(fetched, tuple):
                    self._give_back(fetched[0], seen=False)
        for delivery in self._left:
            self._give_back(delivery)

    def _next_asked(self) -> bool:
        """Wait for the next request. Returns whether to fetch a delivery, or to stop. Renews leases meanwhile."""
        while True:
            due_s = self._renewed + self._renew_s - monotonic()
            if due_s <= 0:  # checked first, because the queue may never be empty
                with suppress(DataplaneError):  # the next request to the node raises the error
                    self._stream._wait(self._renew())
                continue
            with suppress(queue.Empty):
                return self._asked.get(timeout=due_s)

    async def _renew(self) -> None:
        self._renewed = monotonic()
        for delivery in list(self._held.values()):
            with suppress(LeaseExpired):  # raised by the thread that takes the delivery
                await delivery.renew()

    def _fetch(self) -> bool:
        """Fetch and collate a delivery. Returns whether there may be a further one."""
        try:
            found = self._stream._wait(self._one())
            made = None if found is None else (found[0], self._make(*found))
        except asyncio.CancelledError:
            return False
        except BaseException as error:  # raised in the iterating thread
            self.fetched.put(error)
            return False
        self.fetched.put(made)
        return made is not None

    def _make(self, delivery: Delivery, batch: Batch) -> Any:
        try:
            return self._collate(batch)
        except BaseException as error:
            del self._held[id(delivery._inner)]
            self._give_back(delivery, reason=reason_of(error))
            raise

    async def _one(self) -> tuple[Delivery, Batch] | None:
        """Lease and read a delivery, in the plane's event loop. Returns it with its batch; None if the stream is closed
        and the task has no rows left."""
        task = asyncio.current_task()
        assert task is not None, "a coroutine that is awaited is in a task"
        self._fetching = asyncio.get_running_loop(), task
        try:
            if self._stopped:  # checked after `_fetching` is set, so that `stop` cancels this task or this raises
                raise asyncio.CancelledError
            if (delivery := await self._consume()) is None:
                return None
            self._held[id(delivery)] = delivery
            try:
                batch = await delivery.get(timeout=TIMEOUT_S)
            except BaseException as error:
                del self._held[id(delivery)]
                with suppress(DataplaneError):
                    if isinstance(error, asyncio.CancelledError):
                        await delivery.unseen()
                    else:
                        await delivery.nack(reason_of(error))
                raise
            return Delivery(delivery, self._stream._wait, self._stream._turns), batch
        finally:
            self._fetching = None

    async def _consume(self) -> AsyncDelivery | None:
        stream = self._stream._inner
        while True:
            try:
                timeout_s = min(TIMEOUT_S, self._renew_s)
                return await stream.consume(self._task, timeout=timeout_s, **self._how).in_loop(self._loop)
            except NotReady:  # a prefetch has no deadline; `next` checks that of the caller
                await self._renew()
            except Closed as error:
                stream._connection.check()
                if not error.drained:  # the stream was dropped
                    raise
                self.closed = error
                return None

    def _give_back(self, delivery: Delivery, *, seen: bool = True, reason: str = LEFT) -> None:
        """Give a delivery back. `seen`: count it towards `max_deliveries`."""
        if not delivery.settled:
            with suppress(DataplaneError):
                self._stream._wait(delivery._inner.nack(reason) if seen else delivery._inner.unseen())
