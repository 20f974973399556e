"""A small stream, with what the drivers ask of a state machine besides: queues."""

from __future__ import annotations

from dataplane.node.partitions.record import Record
from dataplane.replication.machine import Decision
from tests.simulation.machine import (
    Lease,
    Leased,
    StreamMachine,
    decode_request,
    decode_result,
)

_ADMIN = b"\xc1"  # begins no MessagePack


class Deaf:
    """Nobody audits."""

    def applied(self, count: int, command: bytes, result: bytes) -> None:
        return


def opening(record: Record) -> bytes:
    """The first request to a partition of this machine."""
    return _ADMIN + record.settings


class Machine(StreamMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__(Deaf())

    def decide(self, request: bytes, term: int, now: float) -> Decision:
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
        return b"done" if command[:1] == _ADMIN else super().apply(command)
