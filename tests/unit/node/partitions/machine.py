"""A small stream, with what the drivers ask of a state machine besides: queues, and an outbox of what its nodes are
told."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dataplane.node.partitions.record import Record
from dataplane.replication.lost_nodes import LostNodes
from dataplane.replication.machine import Decision
from tests.simulation.machine import (
    TASKS,
    Lease,
    Leased,
    StreamMachine,
    decode_request,
    decode_result,
    encode,
)

HOLDER = "node:"
"""What the label of a row begins with whose columns are on the node that comes next."""

_ADMIN = b"\xc1"  # begins no MessagePack
_decode = msgspec.msgpack.Decoder(tuple[str, list[str | int]]).decode


class Deaf:
    """Nobody audits."""

    def applied(self, count: int, command: bytes, result: bytes) -> None:
        return


def _asked(what: str, *values: str | int) -> bytes:
    return _ADMIN + msgspec.msgpack.encode((what, values))


def opening(record: Record) -> bytes:
    """The first request to a partition of this machine."""
    return _asked("open", record.settings.decode(), record.number)


class Machine(StreamMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__(Deaf())
        self.admin: dict[str, list[str | int]] = {}
        self.lost: list[str] = []
        self.decided = 0

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        self.decided += 1
        if request[:1] == _ADMIN:
            return Decision((request,))
        asked = decode_request(request)
        decision = super().decide(request, term, now)
        if isinstance(asked, Lease):
            result = decode_result(decision.result)
            assert isinstance(result, Leased)
            return decision if result.rows else Decision()
        return decision

    def serves(self, request: bytes, now: float) -> bool:
        asked = decode_request(request)
        if not isinstance(asked, Lease):
            return True
        done = self.state.done.get(asked.task, ())
        for offset in range(self._low.get(asked.task, 0), len(self.state.rows)):
            row = self._held.get((asked.task, offset))
            if offset not in done and (row is None or not (row.settling or row.until_s > now)):
                return True
        return False

    def apply(self, command: bytes) -> bytes:
        if command[:1] != _ADMIN:
            return super().apply(command)
        what, values = _decode(command[1:])
        if what == "lose":
            self.lost += [row for row in self.state.rows if row.startswith(f"{HOLDER}{values[0]}")]
            self.admin.setdefault(what, []).extend(values)
        elif what == "told":
            node, count = values
            self.admin[f"told {node}"] = [count]
        elif what == "open":
            self.admin[what] = values
        return b"done"

    def snapshot(self) -> bytes:
        return encode((super().snapshot(), self.admin, self.lost))

    def restore(self, state: bytes) -> None:
        if state:
            state, self.admin, self.lost = msgspec.msgpack.decode(
                state, type=tuple[bytes, dict[str, list[str | int]], list[str]]
            )
        super().restore(state)

    # Columns: a row's node is to be told of it once every task has acked it

    def _of(self, node: str) -> list[str]:
        done = set.intersection(*(self.state.done.get(task, set()) for task in TASKS))
        return [row for i, row in enumerate(self.state.rows) if i in done and row.startswith(f"{HOLDER}{node} ")]

    def _told(self, node: str) -> int:
        return int(self.admin.get(f"told {node}", [0])[0])

    def holders(self) -> Iterable[str]:
        named = {row[len(HOLDER) :].split()[0] for row in self.state.rows if row.startswith(HOLDER)}
        return named - {str(node) for node in self.admin.get("lose", [])}

    lost_nodes = LostNodes()  # nobody comes back

    def losing(self, node: str) -> bytes:
        return _asked("lose", node)

    def returning(self, node: str, first: int) -> bytes:
        raise AssertionError("nobody was away")

    def waiting(self) -> Iterable[str]:
        return [node for node in self.holders() if len(self._of(node)) > self._told(node)]

    def outbox(self, node: str, most: int) -> tuple[tuple[bytes, ...], int]:
        told = self._told(node)
        entries = self._of(node)[told : told + most]
        return tuple(entry.encode() for entry in entries), told + len(entries)

    def telling(self, node: str, told: int) -> bytes:
        return _asked("told", node, told)
