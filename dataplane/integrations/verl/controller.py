"""The way to TransferQueue's controller: a request and its answer, from whatever thread.

Sockets of TransferQueue's own belong to an event loop, and how they are lent changes from version to version. These
belong to threads: whoever asks waits in a thread of ours anyway, so no loop is crossed on the way.

What always holds: a thread waits for the answers of all that it has sent before it sends more; a socket whose answer
did not come in time is closed, so a late answer is nobody's. Requests that are sent together are done in their order.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType

from dataplane.clock import Deadline
from dataplane.errors import Closed, Corrupt, PeerUnavailable, Rejected
from dataplane.integrations.verl import zmtp
from dataplane.integrations.verl.lines import Lines

_ANSWER_S = 30.0  # that the controller may take, as TransferQueue itself waits
_METADATA_S = 300.0  # for what TransferQueue waits for without end: the controller may be writing a checkpoint
_LOOK_S = 0.5  # between looks at whether it was closed
_READ = 1 << 18  # bytes at a time
_CLOSED = "TransferQueue's client was closed: call transfer_queue.init()"

#: Of each row: the cell of each field.
Index = Mapping[int, Mapping[str, bytes]]


class Controller:
    """Thread-safe."""

    def __init__(self, info: Any, sender: str) -> None:
        """`info` says where it listens; `sender` is the name that it knows the caller by."""
        self._info = info
        self._sender = sender
        self._address = (info.ip.strip("[]"), int(info.ports["request_handle_socket"]))
        self._lines = Lines(self._address, f"{sender}-line", _METADATA_S)
        self._own = threading.local()
        self._idle: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False

    async def asked(self, request: str, body: Mapping[str, Any], answer: str) -> Any:
        """As `ask`, for event loops: as many at once as there are."""
        return self._said(await self._lines.ask(self._frames(request, body, answer)), answer)

    def ask(self, request: str, body: Mapping[str, Any], answer: str) -> Any:
        """The body of the answer. Raises PeerUnavailable, Rejected (it refuses, and says why), Closed."""
        (said,) = self._ask([(request, body, answer)])
        return said

    def _ask(self, requests: Sequence[tuple[str, Mapping[str, Any], str]]) -> list[Any]:
        """The bodies of the answers to requests that are sent together. Raises as `ask`."""
        told = b"".join([zmtp.message(self._frames(*each)) for each in requests])
        answers = self._exchange(told, len(requests))
        return [self._said(frames, answer) for frames, (_, _, answer) in zip(answers, requests, strict=True)]

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

    def _exchange(self, told: bytes, count: int) -> list[list[bytes]]:
        """So many answers to what is said."""
        answers: list[list[bytes]] = []
        deadline = Deadline.after(_ANSWER_S)
        try:
            own, incoming = self._socket()
            own.settimeout(_ANSWER_S)
            own.sendall(told)
            own.settimeout(_LOOK_S)
            while deadline.remaining_s > 0 and not self._closed:
                with suppress(TimeoutError):
                    answers += incoming.feed(_received(own))
                    if len(answers) == count:
                        self._rest(own)
                        return answers
        except (OSError, Corrupt) as error:
            self._drop()
            raise self._silent() from error
        except BaseException:
            self._drop()
            raise
        self._drop()
        raise self._silent()

    def _silent(self) -> Exception:
        if self._closed:
            return Closed(_CLOSED)
        return PeerUnavailable(
            f"TransferQueue's controller did not answer in {_ANSWER_S:.0f} s, or has ended: if its actor has, or Ray"
            " was started again, call transfer_queue.close() and transfer_queue.init()",
            address=f"tcp://{self._info.ip}",
        )

    def _socket(self) -> tuple[socket.socket, zmtp.Incoming]:
        """This thread's, which is not idle any more. Raises Closed, OSError."""
        found: tuple[socket.socket, zmtp.Incoming] | None = getattr(self._own, "socket", None)
        with self._lock:
            if self._closed:
                raise Closed(_CLOSED)
            if found is not None:
                self._idle.discard(found[0])
        if found is None:
            found = socket.create_connection(self._address, _ANSWER_S), zmtp.Incoming()
            self._own.socket = found
            found[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _shake_hands(*found, f"{self._sender}-{uuid4().hex[:8]}".encode())
        return found

    def _rest(self, own: socket.socket) -> None:
        """It has nothing to do until its thread asks again; whoever closes closes it then."""
        with self._lock:
            if not self._closed:
                self._idle.add(own)
                return
        self._drop()

    def _drop(self) -> None:
        """This thread needs another, if it asks again."""
        found = getattr(self._own, "socket", None)
        self._own.socket = None
        if found is not None:
            found[0].close()

    # What is asked

    async def retrieve(self, keys: Sequence[str], partition: str, create: bool) -> Any:
        """The metadata of these keys' rows, as TransferQueue's client is given it. Raises as `ask`."""
        body = {"keys": list(keys), "partition_id": partition, "create": create}
        return (await self.asked("KV_RETRIEVE_META", body, "KV_RETRIEVE_META_RESPONSE")).get("metadata")

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

    def tell(
        self,
        partition: str,
        rows: Sequence[int],
        schema: Mapping[str, Any],
        cells: Index,
        tags: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """Have it know these cells, and that the fields of `schema` are there; and the tags of rows. Raises as `ask`,
        and Rejected where it does not take them."""
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
        if not self._ask(requests)[0].get("success", True):
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
        for own in idle:
            own.close()
        self._lines.close()


def _shake_hands(own: socket.socket, incoming: zmtp.Incoming, identity: bytes) -> None:
    """Begin a connection. Raises OSError, Corrupt."""
    own.sendall(zmtp.GREETING)
    while not incoming.greeted:
        incoming.feed(_received(own))
    own.sendall(zmtp.ready(identity))
    while not incoming.ready:
        incoming.feed(_received(own))


def _received(own: socket.socket) -> bytes:
    """What comes next. Raises OSError, also where the peer has closed the connection."""
    data = own.recv(_READ)
    if not data:
        raise ConnectionResetError("TransferQueue's controller closed the connection")
    return data
