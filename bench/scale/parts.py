"""What costs grow with the number of members, measured on the real code in this process: greetings, looking members up,
and a stream's limits. All of it is there that more members make dearer; ZeroMQ is not, which `calibrate` has.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from bench.scale.costs import Line
from dataplane.cluster.membership import Member
from dataplane.cluster.static import StaticMembership
from dataplane.node.spread.limits import _Ledger
from dataplane.node.spread.wholes import Wholes
from dataplane.stream.admission import Entry
from dataplane.stream.settings import Settings
from dataplane.wire import peer_messages as pm

FEW, MANY = 16, 1024
_FOR_S = 0.2

_encoder = msgspec.msgpack.Encoder()
_requests = msgspec.msgpack.Decoder(pm.PeerRequest)
_replies = msgspec.msgpack.Decoder(pm.PeerReply)


class _Wire:
    """Another member's side, with the real codecs and none of ZeroMQ: what it answers is answered at no cost here."""

    def __init__(self) -> None:
        self.answers: dict[str, bytes] = {}
        self.numbers = itertools.count(1)

    def next_id(self) -> int:
        return 1

    async def request(self, address: str, request: Any, kind: type, timeout_s: float) -> Any:
        _encoder.encode(request)
        return _replies.decode(self.answers[address])

    def forget(self, address: str) -> None:
        pass


def _address(number: int) -> str:
    return f"tcp://10.{number >> 16}.{number >> 8 & 255}.{number & 255}:47000"


def _members(count: int) -> list[Member]:
    return [Member(number.to_bytes(8, "big"), _address(number), {"tcp": _address(number)}) for number in range(count)]


def _each_us(work: Callable[[], object]) -> float:
    """The least of three."""
    found = []
    for _ in range(3):
        count, began = 0, time.process_time()
        while time.process_time() - began < _FOR_S / 3:
            work()
            count += 1
        found.append((time.process_time() - began) / count * 1e6)
    return min(found)


async def _known(count: int) -> tuple[StaticMembership, _Wire, list[Member]]:
    """A membership of so many that have answered."""
    members, wire = _members(count), _Wire()
    static = StaticMembership(wire, members[0], ())  # type: ignore[arg-type]
    known = [member.address for member in members]
    for member in members[1:]:
        answer = pm.Greeted(1, pm.MAJOR, pm.MINOR, member.node, member.address, dict(member.transports), known)
        wire.answers[member.address] = _encoder.encode(answer)
        await static._greet(member.address)
        static._greeted.add(member.address)
    return static, wire, members


async def _by_members(count: int) -> dict[str, float]:
    static, _, members = await _known(count)
    one = members[count // 2]
    greet = _encoder.encode(pm.Greet(1, pm.MAJOR, pm.MINOR, one.node, one.address, dict(one.transports)))
    found = {"greeted": _each_us(lambda: _encoder.encode(static.greeted(_requests.decode(greet))))}
    found["greeted_bytes"] = float(len(_encoder.encode(static.greeted(_requests.decode(greet)))))
    began, rounds = time.process_time(), max(20, 20000 // count)
    for _ in range(rounds):
        await static._greet(one.address)
        static._bury(one.address, asyncio.get_running_loop().time())
    found["greet"] = (time.process_time() - began) / rounds * 1e6
    found["member_look"] = _each_us(lambda: static.members.get(one.node))
    found["sorting"] = _each_us(lambda: [node for node in sorted(static.members) if node in static._members])
    return found | _limits(static, members)


def _limits(static: StaticMembership, members: list[Member]) -> dict[str, float]:
    """Who keeps the limits of a stream with parts on all of these."""
    wholes = Wholes(members[0].node, None, None, static)  # type: ignore[arg-type]
    settings = Settings(("actor",), max_bytes=1 << 40)
    ledger = _Ledger(SimpleNamespace(settings=settings), wholes)  # type: ignore[arg-type]
    holds = [pm.Holds(1, m.node, "rollouts", 1, 1, 0, 0, None, [], wholes.view) for m in members]
    for each in holds:
        ledger.parts[each.node] = SimpleNamespace(told=each, brought=[])  # type: ignore[assignment]
    tickets: list[int] = []

    def admit() -> None:
        ledger.admission.enter(Entry(None, 1, 1, 0, tickets.append, print))
        ledger.give_back(tickets.pop(), [(members[1].node, 0, 1, 1)])

    return {
        "keeper_told": _each_us(lambda: ledger.tell(holds[1])),
        "keeper_admits": _each_us(admit),
        "holds": _each_us(lambda: wholes.view),
    }


def measured() -> dict[str, Line]:
    """The costs by members, as `costs.Costs` names them; `sorting` a gathering's own."""
    few, many = asyncio.run(_by_members(FEW)), asyncio.run(_by_members(MANY))
    return {name: Line.through((FEW, few[name]), (MANY, many[name])) for name in few}
