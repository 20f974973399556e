"""Requests to TransferQueue's controller, from any thread.

The sockets of TransferQueue's client belong to an event loop, and the way to borrow them differs from version to
version. Here a caller owns a socket until it has its answer, and waits in a thread of this package, so no event loop is
involved.

Invariants: if a request that changes something was sent and not answered, it raises OutcomeUnknown, because the
controller may still execute it; it may be repeated without being applied twice. There are at most as many sockets as
concurrent callers. A socket whose answer did not arrive in time, or whose connection was lost, is closed, so a late
answer is ignored. Requests that are sent together are executed in order. A waiting caller does not keep the process
from ending, and a forked child does not use its parent's sockets.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from uuid import uuid4

import zmq
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from dataplane.clock import Deadline
from dataplane.errors import Closed, DataplaneError, OutcomeUnknown, PeerUnavailable, Rejected
from dataplane.threads import Pool

_ANSWER_S = 30.0  # that the controller may take, as TransferQueue itself waits
_METADATA_S = 300.0  # for requests on which TransferQueue waits without end: the controller may be writing a checkpoint
_LOOK_S = 0.5  # between looks at whether it was closed
_THREADS = 4  # for requests of event loops
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED
_CLOSED = "TransferQueue's client was closed: call transfer_queue.init()"

#: Of each row: the cell of each field.
Index = Mapping[int, Mapping[str, bytes]]


class Controller:
    """The connections to one controller. Any thread may use it."""

    def __init__(self, info: Any, sender: str, answer_s: float = _ANSWER_S) -> None:
        """`info`: the controller's addresses. `sender`: the name of the caller in its messages. `answer_s`: how long
        an answer is waited for."""
        self._info = info
        self._sender = sender
        self._answer_s = answer_s
        self._pool = Pool(_THREADS, "dataplane-controller")
        self._idle: list[_Line] = []
        self._lock = threading.Lock()
        self._closed = False

    async def asked(self, request: str, body: Mapping[str, Any], answer: str, *, changes: bool = False) -> Any:
        """As `ask`, for event loops. A cancelled request that has begun is executed anyway."""
        try:
            waiting = self._pool.submit(partial(self._ask, [(request, body, answer)], _METADATA_S, changes=changes))
        except OSError:
            if self._closed:
                raise Closed(_CLOSED) from None
            raise  # there is no thread
        (said,) = await asyncio.wrap_future(waiting)
        return said

    def ask(self, request: str, body: Mapping[str, Any], answer: str, *, changes: bool = False) -> Any:
        """The body of the answer. Raises Rejected (with the controller's reason), Closed, and without an answer
        PeerUnavailable, or OutcomeUnknown if the request `changes` something."""
        (said,) = self._ask([(request, body, answer)], changes=changes)
        return said

    def _ask(
        self, requests: Sequence[tuple[str, Mapping[str, Any], str]], answer_s: float | None = None, *, changes: bool
    ) -> list[Any]:
        """The bodies of the answers to requests that are sent together. Raises as `ask`; if the first is answered and
        another refused, OutcomeUnknown."""
        answer_s = self._answer_s if answer_s is None else answer_s
        line = self._line()
        answers = None
        try:
            answers = line.exchange([self._frames(*each) for each in requests], answer_s, lambda: self._closed)
        finally:
            self._rest(line, fit=answers is not None)
        if answers is None:
            raise self._silent(answer_s, changes=changes)
        said: list[Any] = []
        for frames, (_, _, answer) in zip(answers, requests, strict=True):
            try:
                said.append(self._said(frames, answer))
            except Rejected as error:
                if not said:
                    raise
                raise OutcomeUnknown(f"a part was done: {error}") from error
        return said

    def _said(self, frames: Sequence[bytes], answer: str) -> Any:
        said = ZMQMessage.deserialize(list(frames))
        if said.request_type != getattr(ZMQRequestType, answer):
            raise Rejected(f"TransferQueue's controller refused: {said.body.get('message', said.request_type)}")
        return said.body

    def _frames(self, request: str, body: Mapping[str, Any], _: str) -> list[Any]:
        made = ZMQMessage.create(
            request_type=getattr(ZMQRequestType, request),
            sender_id=self._sender,
            receiver_id=self._info.id,
            body=dict(body),
        ).serialize()
        return list(made)

    def _silent(self, answer_s: float, *, changes: bool) -> DataplaneError:
        """The error of a request that was not answered."""
        said = _CLOSED
        if not self._closed:
            said = (
                f"TransferQueue's controller did not answer in {answer_s:.0f} s, or has ended: if its actor has, or Ray"
                " was started again, call transfer_queue.close() and transfer_queue.init()"
            )
        if changes:
            return OutcomeUnknown(f"{said}; what it was asked it may have done, or do yet")
        return Closed(said) if self._closed else PeerUnavailable(said, address=f"tcp://{self._info.ip}")

    def _line(self) -> _Line:
        """A connection for one caller, until it is returned. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed(_CLOSED)
            while self._idle:
                line = self._idle.pop()
                if line.pid == os.getpid() and not line.lost:
                    return line
                line.close()
        return _Line(self._info.to_addr("request_handle_socket"), f"{self._sender}-{uuid4().hex[:8]}")

    def _rest(self, line: _Line, *, fit: bool) -> None:
        """Return a connection to the pool, or close it if it is not `fit`."""
        with self._lock:
            if fit and not self._closed:
                self._idle.append(line)
                return
        line.close()

    # Requests

    async def retrieve(self, keys: Sequence[str], partition: str, create: bool) -> Any:
        """The metadata of the rows with these keys, as TransferQueue's client gets it. Raises as `ask`."""
        body = {"keys": list(keys), "partition_id": partition, "create": create}
        return (await self.asked("KV_RETRIEVE_META", body, "KV_RETRIEVE_META_RESPONSE", changes=create)).get("metadata")

    def partitions(self) -> list[str]:
        """The names of all partitions."""
        return list(self.ask("GET_LIST_PARTITIONS", {}, "LIST_PARTITIONS_RESPONSE")["partition_ids"])

    def cells(self, partition: str) -> Index:
        """All cells of a partition."""
        said = self.ask("GET_PARTITION_META", {"partition_id": partition}, "GET_PARTITION_META_RESPONSE")["metadata"]
        return {} if said is None else dict(zip(said.global_indexes, said._custom_backend_meta, strict=True))

    def having(self, partition: str, fields: Iterable[str]) -> set[int] | None:
        """The rows that have any of these fields; None if the controller does not say."""
        body = {"partition_id": partition, "data_fields": list(fields)}
        said = self.ask("GET_PRODUCTION", body, "PRODUCTION_RESPONSE")
        numbers, produced = said.get("global_index"), said.get("production_status")
        return None if numbers is None else set(numbers[produced.any(dim=1)].tolist())

    def tell(
        self,
        partition: str,
        rows: Sequence[int],
        schema: Mapping[str, Any],
        cells: Index,
        tags: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Record these cells, the fields of `schema`, and the tags of the rows; a repeated call changes nothing.
        Raises as `ask`, and Rejected if the controller refuses them."""
        body = {
            "partition_id": partition,
            "global_indexes": list(rows),
            "field_schema": dict(schema),
            "custom_backend_meta": {row: dict(own) for row, own in cells.items()},
        }
        requests: list[tuple[str, Mapping[str, Any], str]] = [("NOTIFY_DATA_UPDATE", body, "NOTIFY_DATA_UPDATE_ACK")]
        if tags:
            tagged = {"partition_custom_meta": {partition: {row: dict(own) for row, own in tags.items()}}}
            requests.append(("SET_CUSTOM_META", tagged, "SET_CUSTOM_META_RESPONSE"))
        if not self._ask(requests, changes=True)[0].get("success", True):
            raise Rejected(
                "TransferQueue's controller did not take the rows, its log says why: all rows of a field are of one"
                " dtype, and tensors or none"
            )

    def save(self, path: str) -> None:
        """Write the controller's state to a file."""
        self.ask("SAVE_CONTROLLER_CHECKPOINT", {"path": path}, "SAVE_CONTROLLER_CHECKPOINT_RESPONSE", changes=True)

    def clear(self, partition: str, rows: Sequence[int]) -> None:
        """Delete these rows at the controller."""
        body = {"global_indexes": list(rows), "partition_ids": [partition] * len(rows)}
        self.ask("CLEAR_META", body, "CLEAR_META_RESPONSE", changes=True)

    def close(self) -> None:
        """Close all connections. Callers that wait for an answer get Closed. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for line in idle:
            line.close()
        self._pool.shutdown(wait=False)


class _Line:
    """One connection, used by one thread at a time."""

    def __init__(self, address: str, identity: str) -> None:
        self.pid = os.getpid()
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.IDENTITY, identity.encode()), (zmq.IPV6, int("[" in address))):
            self._socket.setsockopt(option, value)
        self._events: zmq.Socket[bytes] = self._socket.get_monitor_socket(_LOST)
        self._socket.connect(address)

    @property
    def lost(self) -> bool:
        """Whether the connection was lost since the last answer."""
        return bool(self._events.poll(0))

    def exchange(
        self, requests: Sequence[Sequence[Any]], answer_s: float, ends: Callable[[], bool]
    ) -> list[list[bytes]] | None:
        """The answers, as frames, to requests that are sent together; None if they do not come in time, the
        connection is lost, or `ends` returns true."""
        deadline = Deadline.after(answer_s)
        poller = zmq.Poller()
        for each in (self._socket, self._events):
            poller.register(each, zmq.POLLIN)
        for frames in requests:
            self._socket.send_multipart(frames)
        answers: list[list[bytes]] = []
        while len(answers) < len(requests):
            ready = dict(poller.poll(int(1000 * min(_LOOK_S, deadline.remaining_s))))
            if self._socket in ready:
                answers.append(self._socket.recv_multipart())
            elif ready or not deadline.remaining_s or ends():
                return None
        return answers

    def close(self) -> None:
        """Close it, except in a forked child, which does not own it. Idempotent."""
        if self._socket.closed or self.pid != os.getpid():
            return
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0)
