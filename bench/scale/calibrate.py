"""What the model's costs are on this machine: short runs of real nodes on loopback, one client, and the processor time
of each process that a call took part in.

Rows have their homes on the client's node, or all on the other: so what a home costs is told from what asking it does.
Each is measured with few rows a call and with many, which gives what a call costs and what a row does.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import dataplane as dp
from bench.namespaces import Host, nodes, together
from bench.scale import parts
from bench.scale.costs import Costs, Line
from bench.scale.still import still
from dataplane.cluster.placement import Placement
from dataplane.stream.choosing import _WINDOW

GROUP, FEW, MANY = 8, 16, 512
_CALLS = {FEW: 600, MANY: 200}
_TASK = "actor"
_SMALL = ("--spill", "0", "--prewarm", "0")
_BULK = 256 << 20

Found = dict[str, list[float]]
"""Microseconds a call, by process: the client, its node, the others together."""


def loopback(count: int, directory: Path, memory: str = "256MiB") -> Any:
    """So many nodes on this machine's loopback, with a key, as they would be started on hosts."""
    ends = [("", "127.0.0.1")] * count
    return nodes(ends, directory, memory=memory, options=_SMALL, command="bench.scale.still")


def spent(pid: int) -> float:
    """Seconds of the processor, with a resolution of 10 ms."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


class _Meter:
    """The processor time of this process and of the nodes."""

    def __init__(self, hosts: list[Host], pids: list[int]) -> None:
        self._hosts, self._pids = hosts, pids

    def _now(self) -> list[float]:
        nodes = [spent(pid) for pid in self._pids]
        return [time.process_time(), nodes[0], sum(nodes[1:])]

    async def each(self, calls: int, work: Callable[[int], Awaitable[object]]) -> list[float]:
        """Microseconds that a call took of each."""
        before = self._now()
        for number in range(calls):
            await work(number)
        return [(now - then) / calls * 1e6 for now, then in zip(self._now(), before, strict=True)]


class _Streams:
    """One client's calls on streams whose rows have their homes on one node."""

    def __init__(self, plane: Any, placement: Placement, meter: _Meter) -> None:
        self._plane, self._placement, self._meter = plane, placement, meter

    def _groups(self, name: str, home: bytes, count: int) -> list[int]:
        """Groups of the stream that have their home there."""
        at = self._placement.nodes.index(home)
        found: list[int] = []
        for first in itertools.count(0, 4096):
            homes = self._placement.homes(name, range(first, first + 4096))
            found += (first + np.flatnonzero(homes == at)).tolist()
            if len(found) >= count:
                return found[:count]
        raise AssertionError("there is always another group")

    async def flow(self, name: str, home: bytes, rows: int, behind: int = 0) -> Found:
        """Rows are appended; appended and given; appended, given and acked. What giving and acking take is what each
        has more than the one before. `behind`: how many calls the giving lags."""
        calls, found = _CALLS[rows], {}
        stream = await self._plane.stream(name, tasks=[_TASK])
        groups = iter(self._groups(name, home, (3 * calls + 3 + behind) * rows // GROUP))
        columns, held = {"x": np.zeros(rows, np.float32)}, []

        async def append(number: int) -> None:
            chosen = list(itertools.islice(groups, rows // GROUP))
            await stream.append(columns, group=np.repeat(chosen, GROUP).tolist())

        async def consume(number: int) -> None:
            await append(number)
            how = dp.CompleteGroups(GROUP)
            held.append(await stream.consume(_TASK, rows=rows, min_rows=rows, columns=["x"], sampler=how))

        async def ack(number: int) -> None:
            await consume(number)
            await held.pop().ack()

        for number in range(behind):
            await append(number)
        for what, work in (("ack", ack), ("consume", consume), ("append", append)):
            await work(calls)
            found[what] = await self._meter.each(calls, work)
            if behind:
                break
        await stream.drop()
        if behind:
            return found
        append_us, consume_us, ack_us = found["append"], found["consume"], found["ack"]
        found["consume"] = [max(0.0, both - one) for both, one in zip(consume_us, append_us, strict=True)]
        found["ack"] = [max(0.0, all_ - both) for all_, both in zip(ack_us, consume_us, strict=True)]
        return found

    async def watched(self, name: str, calls: int = 600) -> list[float]:
        """All homes are asked for rows that there are not."""
        stream = await self._plane.stream(name, tasks=[_TASK])

        async def look(number: int) -> None:
            try:
                await stream.consume(_TASK, rows=MANY, min_rows=MANY, columns=["x"], timeout=0)
            except dp.NotReady:
                return
            raise AssertionError("there are no rows")

        await look(0)
        found = await self._meter.each(calls, look)
        await stream.drop()
        return found


async def _calls(hosts: list[Host]) -> dict[str, Any]:
    async with dp.aio.connect(hosts[0].address) as plane:
        members = (await plane.members())["members"]
        ids = [bytes.fromhex(node) for node in members]
        mine = next(bytes.fromhex(node) for node, member in members.items() if member["self"])
        meter = _Meter(hosts, [host.process.pid for host in hosts])
        streams = _Streams(plane, Placement(ids), meter)
        found: dict[str, Any] = {"watched": await streams.watched("watched")}
        if len(hosts) == 2:
            [other] = [node for node in ids if node != mine]
            for where, home in (("here", mine), ("there", other)):
                for rows in (FEW, MANY):
                    found[f"{where} {rows}"] = await streams.flow(f"{where}-{rows}", home, rows)
            found["behind"] = await streams.flow("behind", mine, MANY, behind=_WINDOW // MANY + 1)
        return found


def _bytes(hosts: list[Host]) -> dict[str, float]:
    """Seconds a GB: put and got in shared memory, and the processor's over the link."""
    columns = {"x": np.ones((64, _BULK // 64 // 4), np.float32)}
    rates: dict[str, list[float]] = {"put_s_gb": [], "get_s_gb": [], "link_s_gb": []}
    with dp.connect(hosts[0].address) as ours, dp.connect(hosts[1].address) as theirs:
        for _ in range(4):
            began = time.perf_counter()
            ref = ours.put(columns)
            rates["put_s_gb"].append(time.perf_counter() - began)
            began = time.perf_counter()
            ours.get(ref)["x"].numpy().sum()
            rates["get_s_gb"].append(time.perf_counter() - began)
            before = sum(spent(host.process.pid) for host in hosts)
            theirs.get(ref)
            rates["link_s_gb"].append(sum(spent(host.process.pid) for host in hosts) - before)
            ours.free(ref)
    return {name: sorted(each[1:])[1] / (_BULK / 1e9) for name, each in rates.items()}


async def _gets(hosts: list[Host], calls: int = 300) -> list[float]:
    """Microseconds that a small shard of another host takes of its reader's node, and of its owner's."""
    async with dp.aio.connect(hosts[0].address) as ours, dp.aio.connect(hosts[1].address) as theirs:
        refs = [await ours.put({"x": np.full((8, 256), number, np.float32)}) for number in range(calls)]
        before = [spent(host.process.pid) for host in hosts]
        for ref in refs:
            await theirs.get(ref)
        owner, reader = (spent(host.process.pid) - then for host, then in zip(hosts, before, strict=True))
    return [reader / calls * 1e6, owner / calls * 1e6]


def measure() -> tuple[Costs, dict[str, Any]]:
    """The costs, and what they were made of."""
    still()
    with tempfile.TemporaryDirectory() as scratch:
        with loopback(2, Path(scratch), memory="1GiB") as hosts:
            _together(hosts)
            two, size = asyncio.run(_calls(hosts)), _bytes(hosts)
            two["gets"] = asyncio.run(_gets(hosts))
        with loopback(5, Path(scratch)) as hosts:
            _together(hosts)
            five = asyncio.run(_calls(hosts))
    by_members = parts.measured()
    details = {"two": two, "five": five, "parts": {name: [line.base, line.each] for name, line in by_members.items()}}
    return _costs(two, five, size, by_members), details


def _together(hosts: list[Host]) -> None:
    planes = [dp.connect(host.address) for host in hosts]
    try:
        together(planes)
    finally:
        for plane in planes:
            plane.close()


def _costs(two: dict[str, Any], five: dict[str, Any], size: dict[str, float], by_members: dict[str, Line]) -> Costs:
    """The model's costs, from differences between runs."""

    def line(where: str, what: str, process: int) -> Line:
        few, many = (two[f"{where} {rows}"][what][process] for rows in (FEW, MANY))
        return Line.through((FEW, few), (MANY, many))

    def less(a: Line, *others: Line) -> Line:
        base, each = a.base - sum(o.base for o in others), a.each - sum(o.each for o in others)
        return Line(max(0.0, base), max(0.0, each))

    watched = two["watched"], five["watched"]
    ask = max(0.0, (watched[1][1] - watched[0][1]) / 3)  # the client's node asks three homes more
    answer = watched[0][2]
    front_try = Line(max(0.0, watched[0][1] - ask), 0.0)  # a client's request for which there is nothing here
    asked, answered = Line(ask, 0.0), Line(answer, 0.0)
    home = line("there", "append", 2)
    front = less(line("here", "append", 1), less(home, answered))
    ack = line("here", "ack", 1)
    # An ack of rows that are elsewhere is one question, of rows whose columns are here: who has them is told.
    home_ack = line("there", "ack", 2)
    here = two[f"here {MANY}"]
    behind = two["behind"]["ack"][1] - sum(here[what][1] for what in here)
    greet_wire = Line((ask + answer) / 4, 0.0)  # ZeroMQ's share of a question, which `parts` leaves out
    return Costs(
        client_append=line("here", "append", 0),
        client_consume=line("here", "consume", 0),
        client_ack=line("here", "ack", 0),
        front_append=front,
        ask_append=less(line("there", "append", 1), front),
        home_append=home,
        front_consume=front_try,
        take=line("here", "consume", 1),
        shown=Line(0.0, max(0.0, behind / _WINDOW)),
        ask_take=less(line("there", "consume", 1), front_try, asked),
        home_take=less(line("there", "consume", 2), answered),
        ask_watch=ask,
        home_watch=answer,
        ack=ack,
        ask_ack=less(line("there", "ack", 1), Line(answer, 0.0)),
        home_ack=less(home_ack, asked),
        settle=Line(ask + answer, ack.each / 2),
        read_shard=two["gets"][0],
        send_shard=two["gets"][1],
        greet=Line(by_members["greet"].base + greet_wire.base, by_members["greet"].each),
        greeted=Line(by_members["greeted"].base + greet_wire.base, by_members["greeted"].each),
        member_look=Line(0.0, by_members["member_look"].each),
        gather_look=by_members["sorting"],
        keeper_told=by_members["keeper_told"],
        keeper_admits=by_members["keeper_admits"],
        holds=by_members["holds"],
        greeted_bytes=by_members["greeted_bytes"],
        **size,
    )
