"""The way to TransferQueue's controller: a request and its answer, from whatever thread.

Sockets of TransferQueue's own belong to an event loop, and how they are lent changes from version to version. These
belong to threads: whoever asks waits in a thread of ours anyway, so no loop is crossed on the way.

What always holds: a thread has one request under way; a socket whose answer did not come in time is closed, so a late
answer is nobody's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import zmq
from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType, create_zmq_socket

from dataplane.clock import Deadline
from dataplane.errors import Closed, PeerUnavailable, Rejected

_ANSWER_S = 30.0  # that the controller may take, as TransferQueue itself waits
_LOOK_MS = 500  # between looks at whether it was closed
_CLOSED = "TransferQueue's client was closed: call transfer_queue.init()"

#: Of each row: the cell of each field.
Index = Mapping[int, Mapping[str, bytes]]


class Controller:
    """Any thread may call."""

    def __init__(self, info: Any, sender: str) -> None:
        """`info` says where it listens; `sender` is the name that it knows the caller by."""
        self._info = info
        self._sender = sender
        self._context: zmq.Context[Any] = zmq.Context()
        self._own = threading.local()
        self._idle: set[zmq.Socket[bytes]] = set()
        self._busy = 0
        self._lock = threading.Lock()
        self._closed = False

    def ask(self, request: str, body: Mapping[str, Any], answer: str) -> Any:
        """The body of the answer. Raises PeerUnavailable, Rejected (it refuses, and says why), Closed."""
        told = ZMQMessage.create(
            request_type=getattr(ZMQRequestType, request),
            sender_id=self._sender,
            receiver_id=self._info.id,
            body=dict(body),
        ).serialize()
        said = ZMQMessage.deserialize(self._exchange(told))
        if said.request_type != getattr(ZMQRequestType, answer):
            raise Rejected(f"TransferQueue's controller refused: {said.body.get('message', said.request_type)}")
        return said.body

    def _exchange(self, frames: Sequence[Any]) -> list[Any]:
        socket = self._socket()
        try:
            socket.send_multipart(frames)
            deadline = Deadline.after(_ANSWER_S)
            while deadline.remaining_s > 0 and not self._closed:
                if socket.poll(_LOOK_MS):
                    answer = socket.recv_multipart(copy=False)
                    self._rest(socket)
                    return answer
        except BaseException:
            self._drop(socket)
            raise
        self._drop(socket)
        if self._closed:
            raise Closed(_CLOSED)
        raise PeerUnavailable(
            f"TransferQueue's controller did not answer in {_ANSWER_S:.0f} s: if its actor has ended, or Ray was"
            " started again, call transfer_queue.close() and transfer_queue.init()",
            address=f"tcp://{self._info.ip}",
        )

    def _rest(self, socket: zmq.Socket[bytes]) -> None:
        """It has nothing to do until its thread asks again; whoever closes closes it then."""
        with self._lock:
            if not self._closed:
                self._idle.add(socket)
                self._busy -= 1
                return
        self._drop(socket)

    def _socket(self) -> zmq.Socket[bytes]:
        """This thread's, which is not idle any more. Raises Closed."""
        with self._lock:
            if self._closed:
                raise Closed(_CLOSED)
            self._busy += 1
            self._idle.discard(getattr(self._own, "socket", None))
        found: zmq.Socket[bytes] | None = getattr(self._own, "socket", None)
        if found is None:
            name = f"{self._sender}-{uuid4().hex[:8]}".encode()
            found = create_zmq_socket(ctx=self._context, socket_type=zmq.DEALER, ip=self._info.ip, identity=name)
            found.setsockopt(zmq.LINGER, 0)
            found.connect(self._info.to_addr("request_handle_socket"))
            self._own.socket = found
        return found

    def _drop(self, socket: zmq.Socket[bytes]) -> None:
        """Its thread needs another, if it asks again. The last one takes what it was made in along."""
        self._own.socket = None
        socket.close()
        with self._lock:
            self._busy -= 1
            last = self._closed and not self._busy
        if last:
            self._context.term()

    # What is asked

    def partitions(self) -> list[str]:
        """The names of all partitions."""
        return list(self.ask("GET_LIST_PARTITIONS", {}, "LIST_PARTITIONS_RESPONSE")["partition_ids"])

    def cells(self, partition: str) -> Index:
        """All cells of a partition."""
        said = self.ask("GET_PARTITION_META", {"partition_id": partition}, "GET_PARTITION_META_RESPONSE")["metadata"]
        return {} if said is None else dict(zip(said.global_indexes, said._custom_backend_meta, strict=True))

    def having(self, partition: str, fields: Iterable[str]) -> set[int] | None:
        """The rows that have any of these fields; None where the controller does not say."""
        body = {"partition_id": partition, "data_fields": list(fields)}
        said = self.ask("GET_PRODUCTION", body, "PRODUCTION_RESPONSE")
        numbers, produced = said.get("global_index"), said.get("production_status")
        return None if numbers is None else set(numbers[produced.any(dim=1)].tolist())

    def tell(self, partition: str, rows: Sequence[int], schema: Mapping[str, Any], cells: Index) -> None:
        """Have it know these cells, and that the fields of `schema` are there. Raises as `ask`, and Rejected where it
        does not take them."""
        body = {
            "partition_id": partition,
            "global_indexes": list(rows),
            "field_schema": dict(schema),
            "custom_backend_meta": {row: dict(own) for row, own in cells.items()},
        }
        if not self.ask("NOTIFY_DATA_UPDATE", body, "NOTIFY_DATA_UPDATE_ACK").get("success", True):
            raise Rejected(
                "TransferQueue's controller did not take the rows, its log says why: all rows of a field are of one"
                " dtype, and tensors or none"
            )

    def save(self, path: str) -> None:
        """Have it write its state to a file."""
        self.ask("SAVE_CONTROLLER_CHECKPOINT", {"path": path}, "SAVE_CONTROLLER_CHECKPOINT_RESPONSE")

    def clear(self, partition: str, rows: Sequence[int]) -> None:
        """Have it forget these rows."""
        body = {"global_indexes": list(rows), "partition_ids": [partition] * len(rows)}
        self.ask("CLEAR_META", body, "CLEAR_META_RESPONSE")

    def close(self) -> None:
        """End. What waits for an answer raises Closed. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, set()
            last = not self._busy
        for socket in idle:
            socket.close()
        if last:
            self._context.term()
