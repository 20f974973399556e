"""What members that lie say of streams: requests are answered, with an error where they are nonsense; the node goes on,
and so do its streams.

Who says these things has the cluster's key, where there is one: this is about faults, and about what one node that was
taken over can do to the others' processes, not to streams, which every member may drop.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest

import dataplane as dp
from dataplane.stream import requests as r
from dataplane.stream.sampler import Fifo
from dataplane.wire import messages as m
from dataplane.wire import partition_messages as parts
from dataplane.wire import peer_messages as pm
from tests.chaos.test_peers import voices
from tests.integration.test_hosts import Host, connected, leader
from tests.integration.test_stream_hosts import drained, ids, nothing_kept
from tests.processes import MIB, eventually

HUGE = np.array([0, 1, -1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63)], np.int64)
NONE = np.empty(0, np.int64)
GROUPS = [f"prompt-{i}" for i in range(12)]
encode = msgspec.msgpack.encode


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[list[Host], list[Any]]]:
    with connected(tmp_path) as (hosts, planes):
        order = slice(None, None, -1 if leader(planes, "rollouts") else 1)
        yield hosts[order], planes[order]


class Facts:
    """What a member knows: the nodes, the partition that the first leads, and a reference of the other's."""

    def __init__(self, planes: list[Any], ref: dp.BatchRef) -> None:
        self.to, self.node = (plane.stats().node for plane in planes)

        def led() -> list[str]:
            leads: list[str] = planes[0].members()["members"][self.to]["leads"]
            return [key for key in leads if key.startswith("rollouts/")]

        self.partition = eventually(led, "it leads a partition")[0]
        self.ref = ref


def asked(known: Facts) -> list[r.StreamRequest]:
    """Requests to a partition that no session makes."""
    who, ref = {"client": f"{known.node}/7/1"}, known.ref
    return [
        r.Admit(**who, rows=2**40, nbytes=2**62, version=-(2**62)),
        r.Admit(**who, rows=-1, nbytes=-1, version=0),
        r.GiveBack(**who, ticket=2**62),
        r.Append(**who, ref=ref, versions=NONE),
        r.Append(**who, sequence=2**62, ref=ref, versions=HUGE),
        r.Append(**who, sequence=-5, ref=ref, versions=HUGE[:2], groups=["g"] * 99, keys=["~"]),
        r.Extend(**who, sequence=1, ref=ref, rows=HUGE, holds=HUGE),
        r.Extend(**who, sequence=2, ref=ref, rows=HUGE[:2], keys=["~x.9" * 1000, "~."]),
        r.Consume(**who, task="nobody", columns=(), rows=2**62, min_rows=-1, lease_s=float("nan"), sampler=Fifo()),
        r.Consume(**who, task="actor", columns=("id",), rows=-5, sampler=None, chosen=HUGE, expired=HUGE),
        r.Ack(**who, sequence=3, grant=2**63 - 1),
        r.Nack(**who, sequence=4, grant=-1, replica=2**40),
        r.Renew(**who, grant=-(2**63), replica=-7),
        r.Drop(**who, sequence=5, rows=HUGE, keys=["nobody"], groups=[2**62]),
        r.Find(**who, keys=["~.", "x" * 100_000], digest=b"odd"),
        r.ListDeadLetters(**who, task="actor", most=-(2**62)),
        r.ReadSnapshot(**who, snapshot=2**62, first=2**62, count=2**62),
        r.OutboxReceived(**who, node=b"nobody", last=2**62),
        r.RestoreColumnBatch(**who, sequence=6, rows=HUGE, ref=ref),
    ]


def frame(known: Facts, *items: Any) -> parts.PartitionFrame:
    return parts.PartitionFrame(known.node, 7, list(items))


def mean(known: Facts) -> list[Any]:
    """Messages that no node sends; frames have no answer."""
    node, ref = bytes.fromhex(known.node), known.ref.encode()
    key = known.partition
    questions = [parts.Ask(at, key, r.encode_request(each)) for at, each in enumerate(asked(known))]
    return [
        frame(known, *questions),
        *(frame(known, parts.Ask(at, key, junk, "q" * 1000, 1e300)) for at, junk in enumerate([b"", b"\xc1", b"\x90"])),
        frame(known, parts.Ask(1, "rollouts", b""), parts.Ask(1, "x/y/z", b""), parts.Ask(1, "", b"", "q", -1.0)),
        frame(known, parts.Answered(2**40, b"nonsense"), parts.PartitionRefused(2**40, "NotLeader", "", {"leader": 7})),
        frame(known, parts.Withdrawn(-1), parts.ReplicaHosted(5, 2**60)),
        frame(
            known, parts.SettleOutbox(1, key, 2**62, (b"nonsense",)), parts.SettleOutbox(2, "nobody", -5, (ref, ref))
        ),
        frame(known, parts.HostReplica(1, "no partition"), parts.HostReplica(2, "a/b/x-y")),
        parts.PartitionFrame("", -1, []),
        parts.PartitionFrame("x" * 10_000, 2**62, [parts.Withdrawn(1)]),
        pm.RetainColumns(1, node, 1, key, [b"nonsense"]),
        pm.RetainColumns(1, node, 2, "nobody", [ref, ref]),
        pm.RetainColumns(1, b"unknown!", 3, key, [ref]),
        pm.ReleaseColumns(1, node, 2**62),
        pm.ReleaseColumns(1, node, 2),
        pm.StreamDropped(1, "nothing", "x" * 100_000),
        pm.StreamDropped(1, "rollouts", "another"),
    ]


def test_invalid_stream_messages_of_a_member_are_answered_and_harmless(nodes: tuple[list[Host], list[Any]]) -> None:
    hosts, planes = nodes
    streams = [plane.stream("rollouts", tasks=["actor"]) for plane in planes]
    streams[0].append(ids(12), group=GROUPS)
    other = planes[1].put({"id": np.arange(2)})
    before = psutil.Process(hosts[0].pid).memory_info().rss
    with voices() as voice:
        liar = voice(hosts[0], None)
        for message in mean(Facts(planes, other)):
            liar.say(encode(message))
            liar.say(encode(pm.StreamDropped(77, "nothing", "")), wait_s=10)
            said = []
            while (answer := liar.hear()) is not None and answer.id != 77:
                said.append(answer)
            assert answer is not None, f"it answers nobody any more after {message}"
            for reply in said:
                if isinstance(reply, m.Failure):
                    assert "its log says" not in reply.message, f"{message} was a surprise: {reply}"
    assert psutil.Process(hosts[0].pid).memory_info().rss - before < 64 * MIB
    planes[1].free(other)
    streams[0].close()
    assert sorted(drained(streams[1], "actor", ["id"])) == list(range(12)), "and what was there is delivered"
    streams[0].drop()
    eventually(lambda: all(map(nothing_kept, planes)), "nothing is kept for who lied")
