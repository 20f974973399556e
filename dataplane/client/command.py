"""`dataplane record` writes the rows of a stream to a directory; `dataplane replay` appends them to a new stream.
`dataplane trace` writes the events of all nodes and clients in the last seconds to a file that Perfetto opens."""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any


def add_parsers(commands: Any) -> None:
    """Add the commands to those of `dataplane`."""
    record = commands.add_parser("record", help="record the finished rows of a stream to files, until it is closed")
    record.add_argument("directory", type=Path, metavar="DIR", help="directory of the recording, new or existing")
    record.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    record.add_argument("--stream", required=True, metavar="NAME", help="the stream to record")
    record.add_argument(
        "--task", default="record", metavar="NAME", help="the task whose rows are recorded (default: record)"
    )
    record.add_argument(
        "--columns",
        metavar="NAME,...",
        help="columns to record (default: all that rows have once all other tasks are done)",
    )
    record.add_argument("--media", default="", metavar="NAME,...", help="columns whose equal values are stored once")
    record.add_argument(
        "--max-file-bytes", default="256MiB", metavar="SIZE", help="largest size of a file (default: 256MiB)"
    )
    record.add_argument("--compression", default="zstd", metavar="HOW", help="zstd (default), snappy, lz4 or none")
    record.add_argument(
        "--on-full", default="skip", choices=["skip", "wait"], help="on a full disk, skip rows or wait (default: skip)"
    )
    record.set_defaults(run=_record)

    replay = commands.add_parser("replay", help="append the rows of a recording to a new stream")
    replay.add_argument(
        "directory", type=Path, metavar="DIR", help="directory written by `stream.record` or `dataplane record`"
    )
    replay.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    replay.add_argument("--stream", metavar="NAME", help="name of the new stream (default: as recorded)")
    replay.add_argument("--tasks", metavar="NAME,...", help="its tasks (default: as recorded)")
    replay.add_argument("--columns", metavar="NAME,...", help="columns to replay (default: all)")
    replay.add_argument("--versions", metavar="A-B", help="policy versions to replay: one, or the first and the last")
    replay.add_argument(
        "--max-bytes", metavar="SIZE", help="limit of the new stream (default: a quarter of the node's memory)"
    )
    replay.add_argument("--check", action="store_true", help="verify and describe the recording; needs no node")
    replay.add_argument("--json", action="store_true", help="with --check: as JSON")
    replay.set_defaults(run=_replay)

    trace = commands.add_parser(
        "trace", help="write a trace of all nodes and clients over the last seconds, for Perfetto"
    )
    trace.add_argument("address", nargs="?", help="a node's address (default: $DATAPLANE_ADDRESS)")
    trace.add_argument("--seconds", type=float, default=10.0, metavar="N", help="length of the trace (default: 10)")
    trace.add_argument(
        "--out", type=Path, default=Path("trace.json"), metavar="FILE", help="the file to write (default: trace.json)"
    )
    trace.set_defaults(run=_trace)


def _address(chosen: argparse.Namespace) -> str:
    from dataplane.client.embedded import find

    return find(chosen.address)


def _listed(names: str | None) -> list[str] | None:
    return [name for name in names.split(",") if name] if names else None


def _record(chosen: argparse.Namespace) -> int:
    from dataplane.client.sync import connect

    with connect(_address(chosen)) as plane:
        recording = plane.stream(chosen.stream).record(
            chosen.directory,
            _listed(chosen.columns),
            task=chosen.task,
            media=_listed(chosen.media) or (),
            max_file_bytes=chosen.max_file_bytes,
            compression=chosen.compression,
            on_full=chosen.on_full,
        )
        before = signal.signal(signal.SIGTERM, lambda *_: recording.stop())
        try:
            recording.wait()
        except KeyboardInterrupt:
            recording.close()
        finally:
            signal.signal(signal.SIGTERM, before)
        print(f"{chosen.directory}: {recording.statistics().rows} rows")
    return 0


def _replay(chosen: argparse.Namespace) -> int:
    if chosen.directory.is_file():
        raise ValueError(
            f"{chosen.directory} is a file: the steps of a workload's trace are replayed by `python -m bench.replay`, "
            "and a recording is a directory"
        )
    wanted = _versions(chosen.versions)
    if chosen.check:
        return _check(chosen)
    from dataplane.client.sync import connect

    with connect(_address(chosen)) as plane:
        stream = plane.replay(
            chosen.directory,
            chosen.stream,
            _listed(chosen.tasks),
            versions=wanted,
            columns=_listed(chosen.columns),
            max_bytes=chosen.max_bytes,
        )
        print(f"stream {stream.name} with the tasks {', '.join(stream.settings.tasks)}", flush=True)
        assert stream.replay is not None
        stream.replay.wait()
        print(f"{stream.replay.rows} rows")
    return 0


def _versions(said: str | None) -> range | None:
    if said is None:
        return None
    first, _, last = said.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError:
        raise ValueError(f"versions are a number, or a first and a last such as 3-7, not {said!r}") from None


def _check(chosen: argparse.Namespace) -> int:
    from dataplane.observe.status import counted
    from dataplane.recording import Reader

    reader = Reader(chosen.directory)
    versions: list[int] = []
    rows = 0
    for recorded in reader.rows():
        rows += len(recorded)
        found = [*versions, *recorded.names.versions]
        versions = [min(found), max(found)]
    manifest = reader.manifest
    told = {
        "stream": manifest.stream,
        "tasks": manifest.tasks,
        "columns": manifest.columns,
        "rows": rows,
        "versions": versions,
        "files": len(manifest.files),
        "skipped": manifest.skipped,
        "complete": manifest.complete,
    }
    if chosen.json:
        print(json.dumps(told))
        return 0
    span = f", versions {versions[0]} to {versions[1]}" if versions else ""
    print(f"{rows} rows of stream {manifest.stream}{span}, in {counted(len(manifest.files), 'file')}")
    print(f"tasks: {', '.join(manifest.tasks)}; columns: {', '.join(manifest.columns)}")
    if manifest.skipped:
        print(f"{manifest.skipped} rows were passed over, since the disk was full", file=sys.stderr)
    if not manifest.complete:
        print("the stream was not closed, or the recorder was ended before", file=sys.stderr)
    return 0


def _trace(chosen: argparse.Namespace) -> int:
    from dataplane.client.connecting import Connecting
    from dataplane.client.observing import collect
    from dataplane.observe.trace import Trace

    address = _address(chosen)

    async def ask() -> Trace:
        async with Connecting(address, None, writes=False) as plane:
            return await collect(plane, chosen.seconds)

    trace = asyncio.run(ask())
    with chosen.out.open("w") as file:
        spans = trace.write(file)
    for node, why in trace.missing.items():
        print(f"node {node} is missing: {why}", file=sys.stderr)
    what = f"{spans} events of {len(trace.processes)} processes"
    print(f"{chosen.out}: {what}; open it at https://ui.perfetto.dev")
    return 0
