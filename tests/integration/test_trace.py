"""`dataplane trace`: the last seconds of every process of a cluster, as Perfetto opens them."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from dataplane import cli
from tests.integration.test_hosts import connected
from tests.processes import StandingNode, Worker, eventually
from tests.tools import tool


def traced(address: str, out: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, Any]]:
    """The events of the document that the command writes."""
    assert cli.main(["trace", "--seconds", "60", "--out", str(out), *more, address]) == 0
    assert "ui.perfetto.dev" in capsys.readouterr().out
    found: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    check(found)
    return found


def check(events: list[dict[str, Any]]) -> None:
    """What the format asks for: "Trace Event Format", Google. Slices of a lane are within or after each other, and each
    end of a flow is within a slice."""
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        assert event["ph"] in "MXisf"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert min(event["ts"], event["dur"]) >= 0
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for lane in slices.values():
        inside: list[float] = []
        for began, ended in sorted(lane, key=lambda each: (each[0], -each[1])):
            while inside and inside[-1] <= began + 1e-3:
                inside.pop()
            assert not inside or ended <= inside[-1] + 1e-3
            inside.append(ended)
    ends: dict[int, list[str]] = {}
    for event in events:
        if event["ph"] in "sf":
            ends.setdefault(event["id"], []).append(event["ph"])
            lane = slices[event["pid"], event["tid"]]
            assert any(began - 1e-3 <= event["ts"] <= ended + 1e-3 for began, ended in lane)
    assert all(each == ["s", "f"] for each in ends.values())


def produce(pipe: Any, address: str) -> None:
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts", tasks=["actor"])
        for n in range(5):
            stream.append({"x": [n, n]})
        pipe.send(None)
        pipe.recv()


def consume(pipe: Any, address: str) -> None:
    with dp.connect(address) as plane:
        with plane.stream("rollouts").consume("actor", rows=10, min_rows=10, columns=["x"], timeout=60):
            pass
        pipe.send(None)
        pipe.recv()


def names(events: list[dict[str, Any]]) -> dict[int, str]:
    return {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}


def arrows(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """From which slice to which, by what they are of."""
    slices = [each for each in events if each["ph"] == "X"]

    def within(event: dict[str, Any]) -> str:
        found = [
            each
            for each in slices
            if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
            and each["ts"] - 1e-3 <= event["ts"] <= each["ts"] + each["dur"] + 1e-3
        ]
        return str(min(found, key=lambda each: each["dur"])["name"])

    starts = {each["id"]: within(each) for each in events if each["ph"] == "s"}
    return [(starts[each["id"]], within(each)) for each in events if each["ph"] == "f"]


def test_the_last_events_of_a_killed_client_are_in_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with StandingNode(tmp_path) as node, Worker(produce, node.address) as one:
        one.hear()
        one.kill(signal.SIGKILL)
        with dp.connect(node.address) as plane:
            eventually(lambda: plane.stats().clients == 1, "it has gone")
        events = traced(node.address, tmp_path / "t.json", capsys)
        (process,) = [pid for pid, name in names(events).items() if f"pid {one.pid}" in name]
        assert names(events)[process].endswith("ended)") or "ended" in names(events)[process]
        assert sum(each["name"] == "append" and each["pid"] == process for each in events) == 5


def test_events_of_all_hosts_are_traced_on_one_clock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with connected(tmp_path) as ((one, two), planes):
        with Worker(produce, one.address) as producer:
            producer.hear()
            with Worker(consume, two.address) as consumer:
                consumer.hear()
                events = traced(two.address, tmp_path / "t.json", capsys)
                consumer.say()
            producer.say()
        nodes = {name.split()[1] for name in names(events).values() if name.startswith("node ")}
        assert nodes == {plane.stats().node for plane in planes}
        found = arrows(events)
        assert ("append", "consume") in found
        assert ("consume", "ack") in found
        # On one machine clocks agree: what was asked for after the other's end begins after it.
        last = max(each["ts"] for each in events if each["name"] == "append")
        acked = max(each["ts"] for each in events if each["name"] == "ack")
        assert acked > last


def test_a_trace_can_be_opened_by_the_perfetto_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reader = tool("trace_processor_shell")
    with StandingNode(tmp_path) as node, Worker(produce, node.address) as one:
        one.hear()
        traced(node.address, tmp_path / "t.json", capsys)
        one.say()
    query = "select count(*) from slice where name = 'append'"
    (tmp_path / "q.sql").write_text(query)
    done = subprocess.run([reader, "-q", tmp_path / "q.sql", tmp_path / "t.json"], capture_output=True, text=True)
    assert "5" in done.stdout.split(), done.stdout + done.stderr
