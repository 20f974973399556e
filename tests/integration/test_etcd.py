"""Nodes that are joined by a real etcd: read from each other, through what happens to etcd and to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.etcd import EtcdServer, needs_etcd
from tests.integration.test_hosts import connected, together
from tests.processes import eventually
from tests.streams import take

pytestmark = needs_etcd

NODES = "/dataplane/run-7/members/"


def read(plane: Any, ref: dp.BatchRef) -> Any:
    return plane.get(ref)["x"].to_list()


def led(plane: Any) -> dict[str, list[str]]:
    """The partitions that each node leads."""
    return {node: sorted(member["leads"]) for node, member in plane.members()["members"].items()}


@pytest.mark.parametrize("how", ["the same", "empty"])
def test_batches_are_read_while_etcd_is_away_and_after(tmp_path: Path, how: str) -> None:
    with EtcdServer(tmp_path) as etcd, connected(tmp_path, 2, f"etcd://{etcd.address}/run-7") as (_, (one, other)):
        eventually(lambda: one.members()["coordination"]["answers"], "etcd answers")
        stream, theirs = (plane.stream("s", ["a"]) for plane in (one, other))
        stream.append({"x": [0]})
        assert take(theirs, timeout=60) == [0]
        leads = led(one)
        assert any(leads.values())
        etcd.stop()
        eventually(lambda: not one.members()["coordination"]["answers"], "it says that etcd is away")
        assert read(other, one.put({"x": [1]})) == [1]
        stream.append({"x": [3, 4]})
        assert take(theirs, timeout=60) == [3, 4]
        if how == "empty":
            etcd.wipe()
        etcd.start()
        eventually(lambda: etcd.count(NODES) == 2, "both are registered")
        assert read(one, other.put({"x": [2]})) == [2]
        together(one, other)
        stream.append({"x": [5]})
        assert take(theirs, timeout=60) == [5]
        assert led(one) == leads, "nobody takes another's place"
