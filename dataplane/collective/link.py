"""Messages between the ranks of a group: connections of our own, made through its store, with a deadline for each call.

A link is made at the first call of a group and kept. A failed call ends it: its connections are closed, so a rank that
waits at the other end of one wakes at once, and ends its own. Before that, the first rank that fails writes its reason
to the group's store, where the others read it, including a rank that waits for a third one, because it polls the store.
The next call makes the next link, with the next number.

Invariants: no wait is longer than the call's deadline; a rank that leaves a call by an error of its own leaves no other
waiting; nothing waits for the store longer than `_STORE_S` beyond the deadline, because the process that serves it may
be stopped.

Rejected: `ProcessGroupGloo.abort`, which wakes no waiting rank (torch 2.13).
"""

from __future__ import annotations

import logging
import math
import struct
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import numpy as np

from dataplane.batch.layout import Bytes
from dataplane.clock import Deadline
from dataplane.collective.device_link import DeviceLink, devices_of, nccl_group
from dataplane.device.memory import bytes_tensor
from dataplane.errors import DataplaneError, LimitExceeded, Misuse, PeerUnavailable, describe, revive
from dataplane.threads import Pool

log = logging.getLogger(__name__)

T = TypeVar("T")

Described = tuple[str, str, dict[str, Any]]
"""An error in the form of `errors.describe`."""

_STORE_S = 0.3
_THREADS = 64  # threads of a link; one or two are used unless the store hangs
_WATCH_S = 0.5  # between two looks for a rank that has failed; calls that take less look once, before they begin
_FRAME = 2048  # bytes of the first message of a text; the rest of a longer one follows in a second
_LENGTH = struct.Struct("<Q")
_MOST = 1 << 31  # bytes of a text
_NEVER, _TEXTS = 0, 1  # the tag of no message, and that of texts; payloads have the following ones

_links: weakref.WeakKeyDictionary[Any, RankLink] = weakref.WeakKeyDictionary()
_linking = threading.Lock()


def link_of(group: Any) -> RankLink:
    """The link of a group, created if there is none. Raises Misuse if this process is not in the group."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise Misuse("there is no group of ranks: call torch.distributed.init_process_group first")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        raise Misuse(f"a group is what torch.distributed.new_group returned in a rank of it, not {group!r}")
    with _linking:
        link = _links.get(group)
        if link is None:
            store = dist.PrefixStore("dataplane", dist.distributed_c10d._get_process_group_store(group))
            link = RankLink(store, dist.get_rank(group), dist.get_world_size(group), devices_of(group))
            _links[group] = link
        return link


class RankLink:
    """The connections of this rank. One call uses it at a time; others wait."""

    def __init__(self, store: Any, rank: int, size: int, device_types: Collection[str] = ()) -> None:
        """`device_types`: whose tensors the group sends by NCCL."""
        self.rank = rank
        self.size = size
        self._device_types = device_types
        self._devices: DeviceLink | None = None
        self._store = store
        self._clones = True  # whether the store can make another client
        self._number = 0
        self._peers: Any = None
        self._turn = threading.Lock()
        self._deadline = Deadline.after(0)
        self._sent: list[tuple[Any, int]] = []
        self._over = threading.Event()
        self._interrupted: Future[None] = Future()  # done once the call is interrupted
        self._threads = Pool(_THREADS, "dataplane-store")  # to start one takes longer than what it is for
        weakref.finalize(self, self._threads.shutdown, wait=False).atexit = False

    # A call

    def begin(self, deadline: Deadline) -> None:
        """Take the link for one call, until `end`. Raises PeerUnavailable if another call has it for too long."""
        if not self._turn.acquire(timeout=deadline.remaining_s):
            raise PeerUnavailable("another collective of this process over the same group did not end in time")
        self._deadline = deadline
        self._over, self._interrupted = threading.Event(), Future()

    def end(self, error: BaseException | None) -> None:
        """End the call. An error that the other ranks do not know of ends the link too, and is reported to them."""
        self._over.set()
        try:
            self._sent.clear()
            if error is not None and self.size > 1:
                self._leave_word(described(error, self.rank))
                self._close()
        finally:
            self._turn.release()

    def connect(self) -> None:
        """Connect to all ranks, or connect again if other ranks closed the connections after a failed call in which
        this rank took no part. Raises PeerUnavailable if some do not come before the deadline."""
        if self.size == 1:
            return
        if self._peers is not None:
            if self._word() is None:
                self._watch()
                return
            self._close()
        import torch.distributed as dist

        def come() -> int:
            number = self._number
            while self._store.check([_word(number)]):
                number += 1
            self._store.set(f"{number}/came/{self.rank}", "")
            return number

        def made(number: int) -> Any:
            try:
                own = self._store.clone()  # a client whose waits hold up no other
            except (AttributeError, NotImplementedError, RuntimeError):  # before torch 2.8, or a store in Python
                self._clones, own = False, self._store
            ranks = dist.PrefixStore(f"{number}/ranks", own)
            timeout = timedelta(seconds=max(self._deadline.remaining_s, 0.001))
            try:
                return dist.ProcessGroupGloo(ranks, self.rank, self.size, timeout=timeout)
            except RuntimeError as error:
                raise self._incomplete(number, _short(error)) from None

        try:
            self._number = self._bounded(come, self._deadline.remaining_s + _STORE_S)
            self._peers = self._made(self._threads.submit(made, self._number))
            if self._interrupted.done():  # after `_made` looked
                raise self._interruption()
            self._watch()
        except (RuntimeError, OSError) as error:  # TimeoutError too; others if there is no thread
            raise self._incomplete(None, _short(error) or "its store is silent") from None

    def _made(self, making: Future[Any]) -> Any:
        """The connections, once they are made. Raises TimeoutError `_STORE_S` after the deadline, PeerUnavailable if
        this call is interrupted, and the error of a rank that has failed."""
        until = Deadline.after(self._deadline.remaining_s + _STORE_S)
        while until.remaining_s:
            wait([making, self._interrupted], min(_WATCH_S, until.remaining_s), FIRST_COMPLETED)
            if self._interrupted.done():
                raise self._interruption()
            if making.done():
                return making.result()
            if self._clones and (word := self._word()) is not None:
                raise word
        raise TimeoutError

    def _interruption(self) -> PeerUnavailable:
        return PeerUnavailable("calls of the group were interrupted", address=f"rank {self.rank}")

    def _incomplete(self, number: int | None, why: str) -> PeerUnavailable:
        """The error for ranks that did not come to the link of this number: it names them, if each rank that came there
        is known."""
        ranks = range(self.size) if number is not None else ()
        absent = [str(rank) for rank in ranks if not self._store.check([f"{number}/came/{rank}"])]
        waited = f"{self._deadline.waited_s:.1f} s"
        if not absent:
            message = f"not all {self.size} ranks of the group came in {waited}: {why}"
            return PeerUnavailable(message, address="the group")
        which = f"rank{'s' if absent[1:] else ''} {', '.join(absent)}"
        return PeerUnavailable(f"{which} of {self.size} did not come in {waited}", address=which)

    @property
    def remaining_s(self) -> float:
        """Seconds until the call's deadline."""
        return self._deadline.remaining_s

    # Bytes

    def send(self, rank: int, data: Bytes, tag: int = _TEXTS) -> Any:
        """Begin to send bytes. Returns the work for `wait`; the bytes must not change until then."""
        try:
            return self._peers.send([bytes_tensor(data)], rank, tag)
        except RuntimeError as error:
            raise self._broken(rank, error) from None

    def receive(self, rank: int, into: Bytes, tag: int = _TEXTS) -> Any:
        """Begin to receive as many bytes as `into` has, in the order in which they were sent with this tag."""
        try:
            return self._peers.recv([bytes_tensor(into)], rank, tag)
        except RuntimeError as error:
            raise self._broken(rank, error) from None

    def wait(self, work: Any, rank: int, longer_s: float = 0.0) -> None:
        """Wait for `work`, a send to or receive from `rank`, until `longer_s` after the deadline. To be called once for
        each work. Raises PeerUnavailable, or the error that another rank has reported."""
        within = Deadline.after(self._deadline.remaining_s + longer_s)
        try:  # torch counts milliseconds, and takes 0 as no limit of this wait
            work.wait(timedelta(milliseconds=max(1, math.ceil(within.remaining_s * 1000))))
        except RuntimeError as error:
            raise self._broken(rank, error, ran_out=not within.remaining_s) from None

    def post(self, rank: int, data: Bytes, tag: int) -> None:
        """Send bytes, which must not change until `flush` returns."""
        self._sent.append((self.send(rank, data, tag), rank))

    # Tensors

    def devices(self, device: Any) -> DeviceLink | None:
        """The link between the devices of the ranks; None if this rank has none for tensors of this device."""
        if device is None or device.type not in self._device_types or self.size == 1:
            return None
        if self._devices is None:
            import torch.distributed as dist

            store = dist.PrefixStore(f"{self._number}/devices", self._store)
            try:
                self._devices = DeviceLink(nccl_group(store, self.rank, self.size, device), device)
            except RuntimeError as error:
                log.warning("rows for %s are sent through host memory: %s", device, _short(error))
                return None
        return self._devices if self._devices.device == device else None

    @contextmanager
    def between_devices(self, devices: DeviceLink, before: Sequence[int], after: Sequence[int]) -> Iterator[None]:
        """Connect this rank's device to those of its neighbours, and wait at the end of the block until all tensors are
        sent and received. Raises as `wait`, also for torch's errors within the block."""
        deadline = self._deadline
        try:
            self._bounded(lambda: devices.meet(before, after, deadline), deadline.remaining_s)
            yield
            devices.finish(deadline)
        except (RuntimeError, TimeoutError) as error:
            raise self._broken((*before, *after)[0], error, ran_out=not deadline.remaining_s) from None

    # Texts: short, of any length

    def tell(self, rank: int, text: bytes) -> None:
        """Send a text. It is on its way when this returns, and has arrived when `flush` does."""
        frame = np.zeros(_FRAME, np.uint8)
        whole = _LENGTH.pack(len(text)) + text
        head, rest = whole[:_FRAME], whole[_FRAME:]
        frame[: len(head)] = np.frombuffer(head, np.uint8)
        self.post(rank, frame, _TEXTS)
        if rest:
            self.post(rank, np.frombuffer(rest, np.uint8), _TEXTS)

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        while self._sent:
            self.wait(*self._sent.pop())

    def hear(self, rank: int, longer_s: float = 0.0) -> bytes:
        """The next text from a rank. `longer_s`: see `wait`."""
        return self._heard(rank, *self._listen(rank), longer_s)

    def hear_all(self, ranks: list[int]) -> list[bytes]:
        """The next text from each of these ranks."""
        begun = [(rank, *self._listen(rank)) for rank in ranks]
        return [self._heard(*each) for each in begun]

    def _listen(self, rank: int) -> tuple[Bytes, Any]:
        frame = np.empty(_FRAME, np.uint8)
        return frame, self.receive(rank, frame)

    def _heard(self, rank: int, frame: Bytes, work: Any, longer_s: float = 0.0) -> bytes:
        self.wait(work, rank, longer_s)
        (length,) = _LENGTH.unpack(frame[: _LENGTH.size].tobytes())
        if length > _MOST:
            what = "bytes of what a rank says of its batch"
            raise LimitExceeded(f"{length} {what}; at most {_MOST}", what=what, asked=length, limit=_MOST)
        end = _LENGTH.size + length
        text = frame[_LENGTH.size : min(end, _FRAME)].tobytes()
        if end > _FRAME:
            rest = np.empty(end - _FRAME, np.uint8)
            self.wait(self.receive(rank, rest), rank)
            text += rest.tobytes()
        return text

    # Failures

    def interrupt(self) -> None:
        """Close the connections: a rank that waits here or at the other end of one wakes, and so does a call that is
        connecting. Without a call in progress, the link ends as after a failed call, so all ranks connect again. Any
        thread may call this."""
        if not self._turn.acquire(blocking=False):
            with suppress(InvalidStateError):  # it was interrupted before
                self._interrupted.set_result(None)
            self._shut(self._peers, self._devices)
            return
        try:
            if self._peers is not None:
                self._leave_word(described(self._interruption(), self.rank))
                self._close()
        finally:
            self._turn.release()

    def _shut(self, peers: Any, devices: DeviceLink | None) -> None:
        if devices is not None:
            devices.abort()
        for rank in range(self.size):
            if peers is None or rank == self.rank:
                continue
            with suppress(RuntimeError):  # closed already; else gloo closes all: this wait is too long
                work = peers.recv([bytes_tensor(np.empty(1, np.uint8))], rank, _NEVER)
                work.wait(timedelta(milliseconds=1))

    def _watch(self) -> None:
        """During the call, notice if a rank fails: this one may be waiting for another."""
        over, key, peers = self._over, _word(self._number), self._peers

        def watch() -> None:
            with suppress(RuntimeError):  # the process that serves the store has gone
                while not over.wait(_WATCH_S):
                    if self._store.check([key]):
                        self._shut(peers, self._devices if self._peers is peers else None)
                        return

        with suppress(OSError):  # without a thread, a rank that waits for a third waits until the deadline
            self._threads.submit(watch)

    def _close(self) -> None:
        self._shut(self._peers, self._devices)
        self._peers = self._devices = None
        self._number += 1

    def _broken(self, rank: int, error: Exception, *, ran_out: bool = False) -> DataplaneError:
        """The error for a connection that was closed or timed out: its reason, if a rank has written one. gloo
        closes the connections of a rank that times out before that rank can write its reason, so wait for it
        briefly."""
        word = self._word(0.0 if ran_out else _STORE_S)
        if word is not None:
            return word
        if not ran_out:
            return PeerUnavailable(f"rank {rank} of {self.size} has gone: {_short(error)}", address=f"rank {rank}")
        waited = f"{self._deadline.waited_s:.1f} s"
        return PeerUnavailable(f"rank {rank} of {self.size} did not answer in {waited}", address=f"rank {rank}")

    def _leave_word(self, described: Described) -> None:
        """Write a reason for the others, unless there is one."""
        encoded = msgspec.msgpack.encode(described, enc_hook=str).hex()
        try:
            self._bounded(lambda: self._store.compare_set(_word(self._number), "", encoded), _STORE_S)
        except (RuntimeError, TimeoutError):
            return  # the process that serves the store has gone, which all ranks notice

    def _word(self, wait_s: float = 0.0) -> DataplaneError | None:
        """The reason that a rank has written, or writes within `wait_s`; None if there is none."""
        key = _word(self._number)

        def word() -> str | None:
            if wait_s:
                self._store.wait([key], timedelta(seconds=wait_s))
            return self._store.get(key).decode() if wait_s or self._store.check([key]) else None

        try:
            found = self._bounded(word, wait_s + _STORE_S / 2)
        except (RuntimeError, TimeoutError):
            return None
        return None if found is None else revive(*msgspec.msgpack.decode(bytes.fromhex(found), type=Described))

    def _bounded(self, work: Callable[[], T], timeout_s: float) -> T:
        """The result of a call of the store. Raises TimeoutError if the call takes longer (it then continues in its
        thread), or if no thread can be started."""
        try:
            return self._threads.submit(work).result(timeout_s)
        except OSError as error:
            raise TimeoutError(str(error)) from None


def described(error: BaseException, rank: int) -> Described:
    """An error as the other ranks raise it: its message names the rank."""
    if isinstance(error, DataplaneError):
        name, message, fields = describe(error)
        return name, message if message.startswith("rank ") else f"rank {rank}: {message}", fields
    return "PeerUnavailable", f"rank {rank} failed: {type(error).__name__}: {error}"[:500], {"address": f"rank {rank}"}


def _word(number: int) -> str:
    return f"{number}/failed"


def _short(error: Exception) -> str:
    """gloo's message without its source location and advice."""
    return str(error).rpartition("] ")[2].partition(". ")[0][:200] or str(error)[:200]
