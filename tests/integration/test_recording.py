"""Recordings: rows of a stream as they are done, each once, whatever becomes of the recorder; and a stream of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dataplane as dp
from dataplane import cli
from dataplane.batch.put_plan import plan
from dataplane.client import recorder
from dataplane.client.recorder import Recording
from dataplane.client.streams import AsyncStream
from dataplane.errors import Closed, LimitExceeded, Misuse, OutcomeUnknown, PeerUnavailable
from dataplane.recording import Reader, Writer, part
from tests.cases import each_case
from tests.integration.recorders import records
from tests.processes import StandingNode, Worker, eventually
from tests.unit.batch.exact import materialise

WAIT_S = 60.0
MIB = 1 << 20


def fill(stream: Any, steps: int, rows: int = 8, first: int = 0) -> None:
    """Steps of rows, each a policy version and a group."""
    for step in range(first, first + steps):
        stream.append(
            {"ids": [np.arange(step, step + row) for row in range(rows)], "x": torch.full((rows, 3), step).bfloat16()},
            group=f"g{step}",
            version=step,
            tags={"domain": ["math"] * rows},
        )


def rewarded(stream: Any, rows: int) -> None:
    """The task `actor` does so many rows, and brings their reward."""
    done = 0
    while done < rows:
        with stream.consume("actor", rows=rows - done, columns=["ids"], timeout=WAIT_S) as delivery:
            stream.extend(delivery.ref, {"reward": np.array(delivery.versions, np.float32)})
            done += len(delivery)


def recorded(path: Path) -> list[tuple[str, Any, int]]:
    """The key, group and version of each row."""
    found = [each.names for each in Reader(path).rows()]
    return [row for names in found for row in zip(names.keys, names.groups, names.versions, strict=True)]


def test_finished_rows_are_recorded_and_replayed_as_a_stream(plane: Any, tmp_path: Path, empty: None) -> None:
    stream = plane.stream("rollouts", ["actor", "record"])
    recording: Recording = stream.record(tmp_path / "r")
    fill(stream, 3)
    rewarded(stream, 24)
    stream.close()
    recording.wait(WAIT_S)
    assert recording.statistics().rows == 24
    assert Reader(tmp_path / "r").manifest.complete
    with pytest.raises(Misuse, match="already"):
        plane.replay(tmp_path / "r")
    stream.drop()

    again = plane.replay(tmp_path / "r")
    assert again.name == "rollouts"
    assert list(again.settings.tasks) == ["actor"]
    seen = []
    for delivery in again.deliveries("actor", rows=8, columns=["ids", "x", "reward"], sampler=dp.CompleteGroups(8)):
        (version,) = set(delivery.versions)
        batch = delivery.get()
        assert delivery.groups == [f"g{version}"] * 8
        assert delivery.tags == {"domain": ["math"] * 8}
        assert [row.tolist() for row in batch["ids"].numpy()] == [list(range(version, version + n)) for n in range(8)]
        assert batch["x"].torch().equal(torch.full((8, 3), version).bfloat16())
        assert batch["reward"].torch().tolist() == [version] * 8
        seen += delivery.keys
        del batch
    assert seen == [key.removeprefix("~") for key, _, _ in recorded(tmp_path / "r")]
    again.replay.wait(WAIT_S)
    assert again.replay.rows == 24
    again.drop()


def test_keys_and_groups_that_were_used_again_are_replayed_as_unique_names(plane: Any, tmp_path: Path) -> None:
    stream = plane.stream("rollouts", ["record"], group_size=2)
    with stream.record(tmp_path / "r", ["x"]):
        for value in range(3):
            columns = {"x": np.array([value, 3 + value])}
            stream.append(columns, keys=["a", f"b{value}"], group=7 if value else None)
            eventually(lambda: stream.stats()["rows"] == 0, "the rows are recorded, and their names free")
    names = [name for each in Reader(tmp_path / "r").rows() for name in each.names.rows]
    again = plane.replay(tmp_path / "r", "again", rows=3)
    again.replay.wait(WAIT_S)
    with again.consume("record", rows=6, columns=["x"], timeout=WAIT_S) as delivery:
        assert delivery.keys == ["a", "b0", names[2], "b1", names[4], "b2"]
        assert delivery.groups == [None, None, 7, 7, *[f"7.{names[4]}"] * 2]
        assert delivery.get()["x"].to_list() == [0, 3, 1, 4, 2, 5]


def test_a_directory_has_one_recorder_also_when_the_stream_has_ended(plane: Any, tmp_path: Path) -> None:
    """A closed stream without rows has no columns; the recorder then takes those of the recording."""
    stream = plane.stream("ended", ["actor", "record"])
    fill(stream, 1)
    with stream.record(tmp_path / "r"):
        rewarded(stream, 8)
        stream.close()
    with Writer(tmp_path / "r", Reader(tmp_path / "r").manifest):
        with pytest.raises(Misuse, match="another process"):
            stream.record(tmp_path / "r").wait(WAIT_S)
        stream.drop()
        ended = plane.stream("ended", ["actor", "record"])
        ended.close()
        with pytest.raises(Misuse, match="another process"):
            ended.record(tmp_path / "r").wait(WAIT_S)
    again = ended.record(tmp_path / "r")
    again.wait(WAIT_S)
    assert again.statistics().rows == 8
    nothing = ended.record(tmp_path / "new")
    nothing.wait(WAIT_S)
    assert nothing.statistics().rows == 0


def test_a_damaged_recording_ends_its_consumers(plane: Any, tmp_path: Path) -> None:
    stream = plane.stream("rollouts", ["record"])
    fill(stream, 4)
    with stream.record(tmp_path / "r", ["ids"]):
        pass
    (path,) = (tmp_path / "r" / "rows").iterdir()
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    again = plane.replay(tmp_path / "r", "again", ["actor"])
    with pytest.raises(Closed):
        again.consume("actor", rows=1, columns=["ids"], timeout=WAIT_S)
    with pytest.raises(dp.Corrupt, match="damaged"):
        again.replay.wait(WAIT_S)


def test_a_recorder_closed_while_the_disk_is_full_returns_its_rows(
    plane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object) -> None:
        raise LimitExceeded(f"{path} does not fit")

    stream = plane.stream("rollouts", ["record"])
    fill(stream, 3)
    with monkeypatch.context() as patched:
        patched.setattr(part, "write", full)
        recording: Recording = stream.record(tmp_path / "r", ["ids"], rows=8, on_full="wait")
        eventually(lambda: recording.error is not None, "it waits for room")
        with pytest.raises(LimitExceeded):
            recording.close()
    left = stream.stats()["task"]["record"]
    assert (left["pending"], left["leased"], left["dead"], left["redelivered"]) == (24, 0, 0, 0)
    with stream.record(tmp_path / "r", ["ids"]):
        pass
    assert len(recorded(tmp_path / "r")) == 24


def test_a_recorder_waits_while_rows_cannot_be_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(recorder, "_READ_S", 0.2)
    config = dp.NodeConfig(memory="8MiB", spill="32MiB", spill_dir=tmp_path, prewarm=0)
    with dp.connect(config=config) as plane:
        stream = plane.stream("rollouts", ["record"])
        for seed in range(6):
            stream.append({"x": [np.full(MIB, seed, np.uint8)]})
        held = [plane.get(plane.put({"y": [np.full(MIB, 7, np.uint8)]}))["y"].numpy() for _ in range(7)]
        recording: Recording = stream.record(tmp_path / "r", ["x"], max_file_bytes=1)
        eventually(lambda: "has to read rows again" in caplog.text, "all memory is held")
        assert len(held) == 7
        held.clear()
        stream.close()
        recording.wait(WAIT_S)
    found = [materialise(plan(each.columns))["x"].numpy() for each in Reader(tmp_path / "r").rows()]
    assert [int(row[0]) for rows in found for row in rows] == [*range(6)]


def test_rows_delivered_together_with_an_unreadable_one_are_recorded(tmp_path: Path) -> None:
    config = dp.NodeConfig(memory="8MiB", spill="32MiB", spill_dir=tmp_path / "spill", prewarm=0)
    with dp.connect(config=config) as plane:
        stream = plane.stream("rollouts", ["record"], max_deliveries=2)
        for seed in range(12):
            stream.append({"x": [np.full(MIB, seed, np.uint8)]})
        files = (tmp_path / "spill").rglob("*")
        os.truncate(next(file for file in files if file.is_file() and file.stat().st_size >= MIB), 0)
        recording: Recording = stream.record(tmp_path / "r", ["x"], rows=4)
        stream.close()
        recording.wait(WAIT_S)
        assert recording.statistics().rows == 11
        assert len(stream.dead_letters("record")) == 1


@each_case("on_full", ["skip", "wait"])
def test_a_recorder_whose_disk_was_full_for_a_while_has_no_error(
    plane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, on_full: str
) -> None:
    pack, full = Writer._pack, [True]

    def once(writer: Writer, *args: Any) -> bool:
        if full:
            full.clear()
            raise LimitExceeded("no room for a file")
        return pack(writer, *args)

    monkeypatch.setattr(Writer, "_pack", once)
    stream = plane.stream(on_full, ["record"])
    fill(stream, 3)
    recording: Recording = stream.record(tmp_path / "r", ["ids"], rows=8, max_file_bytes=1, on_full=on_full)
    stream.close()
    recording.wait(WAIT_S)
    assert "keeps the rows in parts: no room for a file" in caplog.text
    assert "skips rows" not in caplog.text
    assert (recording.error, full, len(recorded(tmp_path / "r"))) == (None, [], 24)


def test_rows_that_do_not_fit_together_are_replayed_in_parts(plane: Any, tmp_path: Path) -> None:
    stream = plane.stream("rollouts", ["record"])
    for seed in range(8):
        stream.append({"x": [np.full(300 << 10, seed, np.uint8)]})
    with stream.record(tmp_path / "r", ["x"]):
        pass
    with dp.connect(config=dp.NodeConfig(memory="1MiB", spill=0, prewarm=0)) as small:
        again = small.replay(tmp_path / "r", "again", ["actor"])
        deliveries = again.deliveries("actor", rows=1, columns=["x"])
        assert [int(delivery.get()["x"].numpy()[0][0]) for delivery in deliveries] == [*range(8)]


def once_unanswered(monkeypatch: pytest.MonkeyPatch, name: str, *, before: bool) -> None:
    """The first call of this method of streams is not answered; `before`: nor done."""
    method, failed = getattr(AsyncStream, name), list[str]()

    async def call(stream: Any) -> Any:
        result = None if before and not failed else await method(stream)
        if failed:
            return result
        failed.append(name)
        raise PeerUnavailable("it does not answer") if before else OutcomeUnknown("it has not answered")

    monkeypatch.setattr(AsyncStream, name, call)


def test_unanswered_calls_end_neither_recorder_nor_replay(
    plane: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = plane.stream("rollouts", ["actor", "record"])
    once_unanswered(monkeypatch, "stats", before=True)
    with stream.record(tmp_path / "r") as recording:
        fill(stream, 2)
        rewarded(stream, 16)
        stream.close()
        recording.wait(WAIT_S)
    once_unanswered(monkeypatch, "close", before=False)
    again = plane.replay(tmp_path / "r", "again", ["actor"])
    again.replay.wait(WAIT_S)
    assert again.stats()["rows"] == 16


@pytest.mark.leaks(reason="killed processes leave their sockets to the node for a moment")
def test_each_row_is_recorded_once_though_the_recorder_is_killed_again_and_again(
    node: StandingNode, tmp_path: Path
) -> None:
    steps, kills = 20, 4
    with dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", ["record"])
        for number in range(kills):
            worker = Worker(records, node.address, tmp_path / "r", 3)
            worker.hear()
            fill(stream, steps // kills, first=number * (steps // kills))
            left = 8 * (steps // kills) // (number + 1)
            eventually(lambda most=left: stream.stats()["task"]["record"]["pending"] <= most, "it records")
            worker.kill()
        stream.close()
        worker = Worker(records, node.address, tmp_path / "r", 3)
        worker.hear()
        assert worker.hear() == 8 * kills * (steps // kills)
        worker.join()
    found = recorded(tmp_path / "r")
    assert len(found) == len(set(found)) == 8 * kills * (steps // kills)
    assert {version for _, _, version in found} == set(range(kills * (steps // kills)))
    assert list((tmp_path / "r" / "_open").iterdir()) == [tmp_path / "r" / "_open" / "lock"]


def test_the_commands_record_check_and_replay(node: StandingNode, tmp_path: Path, capsys: Any) -> None:
    path = str(tmp_path / "r")
    with dp.connect(node.address) as plane:
        stream = plane.stream("rollouts", ["actor", "record"])
        fill(stream, 3)
        rewarded(stream, 24)
        stream.close()
        assert cli.main(["record", path, "--stream", "rollouts", node.address]) == 0  # the address in any place
        assert capsys.readouterr().out == f"{path}: 24 rows\n"
        with Writer(tmp_path / "other", Reader(tmp_path / "r").manifest):
            assert cli.main(["record", str(tmp_path / "other"), node.address, "--stream", "rollouts"]) == 1
        assert "another process" in capsys.readouterr().err
        stream.drop()
        assert cli.main(["replay", path, "--check"]) == 0
        assert "24 rows of stream rollouts, versions 0 to 2, in 1 file\n" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            cli.main(["replay", path, node.address, "--check", "unknown"])
        assert "unrecognized arguments: unknown" in capsys.readouterr().err
        assert cli.main(["replay", path, "--check", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["rows"], shown["versions"], shown["complete"]) == (24, [0, 2], True)
        assert sorted(shown["columns"]) == ["ids", "reward", "x"]
        chosen = ["--stream", "again", "--tasks", "debug", "--versions", "1-2"]
        assert cli.main(["replay", path, node.address, *chosen]) == 0
        again = plane.stream("again")
        found = [version for each in again.deliveries("debug", rows=8, columns=["x"]) for version in each.versions]
        assert found == [1] * 8 + [2] * 8
