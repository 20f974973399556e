"""What members that lie say of streams: each message is answered, with an error where it is nonsense; the node goes on,
and so do its streams.

Who says these things has the cluster's key, where there is one: this is about faults, and about what one node that was
taken over can do to the others' processes, not to streams, which every member may drop.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

import dataplane as dp
from dataplane.stream.block import Block
from dataplane.stream.settings import Settings
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm
from tests.chaos.test_peers import changed, voices
from tests.integration.test_hosts import Host, together
from tests.integration.test_stream_hosts import drained, ids, nothing_kept
from tests.processes import MIB, eventually

SETTINGS = Settings(("actor",))
HUGE = [0, 1, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)]
GROUPS = [f"prompt-{i}" for i in range(12)]
encode = msgspec.msgpack.encode


def packed(*rows: int) -> bytes:
    return np.array(rows, np.int64).tobytes()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[list[Host], list[Any]]]:
    with (
        Host(tmp_path / "one") as one,
        Host(tmp_path / "two", one) as other,
        dp.connect(one.address) as here,
        dp.connect(other.address) as there,
    ):
        together(here, there)
        yield [one, other], [here, there]


class Facts:
    """What a member knows of a stream: where its part is, and a reference that is its."""

    def __init__(self, ask: Any, node: str, ref: dp.BatchRef) -> None:
        part = ask(pm.OpenPart(1, "rollouts", SETTINGS, 0, False))
        assert isinstance(part, pm.Part)
        self.token, self.whole, self.mark = part.token, part.whole, part.mark
        self.generation = part.generation
        self.node = bytes.fromhex(node)
        self.ref = ref.encode()


def block(count: int = 2, **said: Any) -> Block:
    """A block of rows that some home might tell of."""
    right = Block(
        packed(*range(count)),
        ["g"] * count,
        packed(*[1] * count),
        np.zeros(count).tobytes(),
        {},
        [""] * count,
        [],
        bytes(count),
        bytes(count),
        [],
    )
    return msgspec.structs.replace(right, **said)


def mean(known: Facts) -> list[Any]:
    """Messages that no node sends."""
    token, node, ref, columns = known.token, known.node, known.ref, [(packed(0, 1), -1, known.ref, {})]

    def ask(request: Any, number: int = 1) -> pm.Ask:
        return pm.Ask(1, b"liarliar", client=1, number=number, answered=[2**62, -1], request=encode(request))

    def announce(of: Block, columns: list[Any] = columns, **how: Any) -> pm.Announce:
        return pm.Announce(
            1,
            name="rollouts",
            settings=SETTINGS,
            generation=known.generation,
            token=b"sometok!",
            block=of,
            columns=columns,
            **how,
        )

    def holds(**how: Any) -> pm.Holds:
        nothing = {"changes": 0, "rows": 0, "nbytes": 0, "oldest": None, "behind": []}
        return pm.Holds(1, **{"name": "rollouts", "generation": known.generation, **nothing, **how})

    requests = [
        m.Watch(1, token, "actor", 2**40, ["id"], None, 2**62, 0, False, 0.0),
        m.Watch(1, token, "nobody", 1, ["id"], None, 1, 0, False, 0.0),
        m.Watch(1, token, "actor", -5, [], None, -1, -1, False, float("nan")),
        m.Where(1, token, ["~x.9" * 1000, "~.", "~" + known.mark + "." + "9" * 400]),
        m.Append(1, token, 0, "", ref, [], b"", ["g"] * 99, packed(1, 1), {}, {}),
        m.Append(1, token, 2**62, "", b"nonsense", [], b"", [], b"", {}, {}),
        m.Extend(1, token, "", ref, packed(2**62, -1), b"", [], {}, False),
        m.Extend(1, token, "", ref, packed(0, 1), packed(2**62, -(2**62)), [], {}, True),
        m.Ack(1, token, 2**63 - 1, None, True, True),
        m.Ack(1, known.whole, -1, 2**40, True, True),
        m.Renew(1, token, -(2**63), -7),
        m.DropRows(1, token, packed(*HUGE), [], []),
        m.DropRows(1, known.whole, packed(1), [], [], [(token, packed(2**50))]),
        m.DropRows(1, known.whole, packed(1), [], [], [(b"nobody", packed(0))]),
        m.Admit(1, known.whole, 2**40, 2**62, 0, "", b"", 0.0),
        m.Admit(1, token, -1, -1, 0, "", b"", 0.0),
        m.GiveBack(known.whole, 2**62, [(b"x", 2**62, -(2**62), 2**62)]),
        m.Look(1, token, "actor", "", None, 0, ["id"], [], [], 2**62, -1, 0.0),
        m.Dead(1, token, "actor", -(2**62)),
        m.ReadSnapshot(1, 2**62, 2**62, 2**62),
    ]
    return [
        *(ask(request, number) for number, request in enumerate(requests)),
        ask(requests[0], 2**63 - 1),
        pm.Ask(1, b"", client=-1, number=-1, answered=[], request=b"\xc1"),
        pm.Ask(1, b"x" * 1000, client=2**62, number=5, answered=[1] * 10_000, request=b"\x91" * 10_000),
        pm.NotAsked(1, b"nobody", -5),
        pm.ClientGone(1, b"nobody", 2**62),
        pm.OpenPart(1, "x" * 100_000, SETTINGS, 0, False),
        pm.OpenPart(1, "other", SETTINGS, 2**63 - 1, False),
        pm.OpenPart(1, "other", SETTINGS, -(2**62), True),
        pm.OpenPart(1, "none", None, 7, False),
        pm.DropStream(1, "nothing", 2**63 - 1),
        pm.DropStream(1, "x" * 100_000, 1),
        pm.Locate(1, b""),
        *(pm.Settled(1, settled=[(token, task, packed(*HUGE), 2, [])]) for task in (-9, -2, -1, 0, 1, 63, 64, 2**40)),
        *(pm.Settled(1, settled=[(known.whole, 0, packed(0, 0, 0), state, [])]) for state in (-1, 0, 1, 77, 2**40)),
        pm.Settled(1, settled=[(b"nobody", 0, b"odd", 2, [(b"x", b"odd")])]),
        pm.Settled(1, settled=[(token, 0, packed(0), 2, [(b"x", packed(*HUGE))])] * 100),
        announce(block(rows=packed(5, 5))),
        announce(block(rows=packed(9, 3))),
        announce(block(rows=packed(-7, 2**62))),
        announce(block(rows=b"odd")),
        announce(block(states=b"\x09\x09")),
        announce(block(states=b"\x01")),
        announce(block(ages_s=np.array([np.nan, np.inf]).tobytes())),
        announce(block(tags={"t": [1]})),
        announce(block(groups=["g"] * 3)),
        announce(block(keys=["~x", "a" * 100_000])),
        announce(block(calls=[("a", 2**62, 2**62, b"")])),
        announce(block(dropped=[("g", [2**62])])),
        announce(block(0)),
        announce(block(), [(packed(0), 99, ref, {})]),
        announce(block(), [(packed(0, 1), 99, ref, {"id": b"odd"})]),
        announce(block(), [(packed(0, 1), -1, b"nonsense", {})]),
        announce(block(), others=[(b"x", b"odd")]),
        announce(block(rows=packed(100, 101)), holders=[b"", b"x" * 1000], moved=True),
        msgspec.structs.replace(announce(block()), settings=Settings(("other",))),
        msgspec.structs.replace(announce(block()), generation=-(2**62)),
        pm.AnnounceColumns(1, name="rollouts", token=b"sometok!", columns=[(packed(*HUGE[:2]), -5, ref, {})]),
        pm.AnnounceColumns(
            1, name="rollouts", token=b"nobody", columns=[(packed(0, 1), 2**40, ref, {"none": packed(1, 2)})]
        ),
        pm.AnnounceColumns(1, name="nothing", token=b"", columns=[(b"odd", 0, b"", {})]),
        pm.Moved(1, node, token=token, were=packed(0, 1), part=b"t", whole=b"w", mark="mark", rows=packed(0)),
        pm.Moved(1, node, token=token, were=packed(1, 0), part=b"t", whole=b"w", mark="mark", rows=packed(5, 5)),
        pm.Moved(1, token=b"nobody", were=packed(*HUGE), part=b"", whole=b"", mark="", rows=packed(*HUGE)),
        *(pm.Unmoved(1, token=of, to=b"t", began=2**62, rows=packed(*HUGE)) for of in (token, b"nobody")),
        pm.Unmoved(1, token=token, to=token, began=-1, rows=b"odd"),
        pm.Still(1, b"nobody", members=b"x" * 1000),
        holds(node=node, changes=2**63 - 1, rows=2**63 - 1, nbytes=2**63 - 1, oldest=-(2**63), behind=["x"] * 1000),
        holds(node=b"nobody", since=2**62, changes=-1, rows=-(2**62), nbytes=-(2**62), members=b"x"),
        holds(node=b"nobody", name="nothing", generation=-1),
    ]


def test_messages_of_streams_that_no_node_sends(nodes: tuple[list[Host], list[Any]]) -> None:
    hosts, planes = nodes
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in planes]
    streams[0].append(ids(12), group=GROUPS)
    other = planes[1].put({"id": np.arange(2)})
    before = psutil.Process(hosts[0].pid).memory_info().rss
    with voices() as voice:
        liar = voice(hosts[0].listens, None)
        for message in mean(Facts(liar.ask, planes[1].stats().node, other)):
            liar.say(encode(message))
            liar.say(encode(pm.Locate(77, b"nothing")), wait_s=10)
            said = []
            while (answer := liar.hear()) is not None and answer.id != 77:
                said.append(answer)
            assert answer is not None, f"it answers nobody any more after {message}"
            while not said:
                said.append(liar.hear())
            (reply,) = said
            assert reply is not None, f"no answer to {message}"
            if isinstance(reply, m.Failure):
                assert "its log says" not in reply.message, f"{message} was a surprise: {reply}"
    assert psutil.Process(hosts[0].pid).memory_info().rss - before < 64 * MIB
    planes[1].free(other)
    found = [i for i in drained_of(streams[1]) if i < 12]
    assert sorted(found) == list(range(12)), "and what was there is delivered"
    for stream in streams[:1]:
        stream.drop()
    eventually(lambda: all(map(nothing_kept, planes)), "nothing is kept for who lied")


def test_rows_whose_columns_are_with_who_is_not_known_are_nobodys(nodes: tuple[list[Host], list[Any]]) -> None:
    """He has died, or this node has not heard of him yet. Who was given them could not read them, again and again."""
    hosts, planes = nodes
    stream = planes[0].stream("rollouts", tasks=["actor"])
    mine = planes[1].put({"id": np.arange(2)})
    with voices() as voice:
        liar = voice(hosts[0].listens, None)
        known = Facts(liar.ask, planes[1].stats().node, mine)
        his = known.ref.replace(known.node, b"unknown!")
        assert his != known.ref
        asked = pm.Announce(
            1,
            name="rollouts",
            settings=SETTINGS,
            generation=known.generation,
            token=b"sometok!",
            block=block(),
            columns=[(packed(0, 1), -1, his, {})],
        )
        reply = liar.ask(asked)
        assert isinstance(reply, pm.Announced)
        assert len(reply.rows) == 2 * 8
    assert stream.stats()["rows"] == 2
    with pytest.raises(dp.NotReady):
        stream.consume("actor", rows=1, columns=["id"], timeout=0.5).__enter__()
    eventually(lambda: stream.stats()["rows"] == 0, "nobody has told of them")
    assert len(stream.lost()) == 2


def drained_of(stream: Any) -> list[int]:
    """What the task is given until there is nothing more for a while, row by row: a liar's rows can not be read."""
    found: list[int] = []
    while True:
        try:
            with stream.consume("actor", rows=1, columns=["id"], timeout=0.5) as delivery:
                found += [int(i) for i in delivery.get()["id"].to_list()]
        except dp.NotReady:
            return found
        except (dp.Lost, dp.PeerUnavailable):
            continue


def test_messages_of_streams_that_were_changed_on_their_way(nodes: tuple[list[Host], list[Any]]) -> None:
    """Members lie or not: the node goes on, and a stream that nobody named is as it was."""
    hosts, planes = nodes
    chance = random.Random(3)
    stream = planes[1].stream("unharmed", tasks=["actor"])
    stream.append(ids(12), group=GROUPS)
    other = planes[1].put({"id": np.arange(2)})
    with voices() as voice:
        liar = voice(hosts[0].listens, None)
        right = [encode(message) for message in mean(Facts(liar.ask, planes[1].stats().node, other))]
        for _ in range(1500):
            liar.say(changed(chance, chance.choice(right)))
        liar.say(encode(pm.Locate(77, b"nothing")), wait_s=10)
        while (answer := liar.hear()).id != 77:
            pass
        assert isinstance(answer, pm.Located), "it answers still"
    stream.close()
    assert sorted(drained(planes[0].stream("unharmed"), "actor", ["id"])) == list(range(12))


@pytest.mark.parametrize("member", [True, False])
def test_who_asks_under_many_names_is_refused(nodes: tuple[list[Host], list[Any]], member: bool) -> None:
    hosts, planes = nodes
    other = bytes.fromhex(planes[1].stats().node)
    with voices() as voice:
        liar = voice(hosts[0].listens, None)
        refused = 0
        for number in range(4200):
            asked = pm.Ask(
                number,
                other if member else number.to_bytes(8, "little"),
                client=number,
                number=number,
                answered=[],
                request=encode(m.Streams(1, None)),
            )
            answer = liar.ask(asked)
            reply = msgspec.msgpack.decode(answer.reply, type=m.Reply) if isinstance(answer, pm.Answer) else answer
            refused += isinstance(reply, m.Failure) and reply.name == ("LimitExceeded" if member else "Backpressure")
        assert refused >= (4200 - 4096 if member else 4200)
    stream = planes[0].stream("rollouts", tasks=["actor"])
    stream.append(ids(3))
    stream.close()
    assert sorted(drained(stream, "actor", ["id"])) == [0, 1, 2]
