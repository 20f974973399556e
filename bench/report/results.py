"""Reads the files that benchmarks write, and names the missing ones with the commands that make them.

Invariant: no figure is filled in. A sentence reports each file that is missing, or was not written by a benchmark.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

#: By the file's name, its title and the command that makes it.
EXPECTED = {
    "peers": ("Other systems", "python -m bench.peers"),
    "local": ("One host", "python -m bench.local"),
    "stream": ("Streams", "python -m bench.stream"),
    "singly": ("Single rows", "python -m bench.singly, where Ray and TransferQueue are installed"),
    "media": ("Images", "python -m bench.media"),
    "durable": ("Durable streams and tables", "python -m bench.durable"),
    "replay": ("A training step", "python -m bench.replay"),
    "replay_video": (
        "The video step, 64 prompts by 8, in 2 GiB",
        "python -m bench.replay video --prompts 64 --samples 8 --memory 2GiB --payload-scale 1 --speed 8 --slots 32"
        " --mode sync --json bench/results/replay_video.json",
    ),
    "hosts": ("Several hosts", "make bench-hosts"),
    "partition": ("The leader of a stream", "make bench-hosts"),
    "transports": ("Transports", "python -m bench.transports"),
    "scale": ("Many hosts", "python -m bench.scale"),
    "doors": ("TransferQueue by its configuration", "python -m bench.doors"),
    "doors_transfer_queue": ("TransferQueue's calls", "python -m bench.doors_transfer_queue"),
    "doors_verl": ("verl's DataProto", "python -m bench.doors_verl"),
    "doors_images": ("What verl's responses share", "python -m bench.doors_images"),
}


@dataclass(frozen=True)
class Results:
    """The read files by name, and a sentence for each missing one."""

    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: tuple[str, ...] = ()


def read(directory: Path) -> Results:
    """Read all expected files of a directory."""
    files, missing = {}, []
    for name, (title, command) in EXPECTED.items():
        path = directory / f"{name}.json"
        try:
            content = json.loads(path.read_text())
        except FileNotFoundError:
            missing.append(f"{title}: there is no {path.name}; `{command}` makes it")
            continue
        except ValueError as error:
            missing.append(f"{title}: {path.name} is not JSON ({error}); `{command}` makes it anew")
            continue
        if not isinstance(content, dict) or not {"machine", "rows"} <= content.keys():
            missing.append(f"{title}: {path.name} has no machine and rows; `{command}` makes it anew")
            continue
        files[name] = content
    return Results(files, tuple(missing))


@dataclass(frozen=True)
class Table:
    """Cells of text under headings."""

    headings: tuple[str, ...]
    cells: list[tuple[str, ...]]


def promises(content: dict[str, Any]) -> Table:
    """The rows of a file as a table: median, target, whether it is met, spread."""
    cells = []
    for row in content["rows"]:
        runs = row.get("runs") or [row["value"]]
        spread = f"{min(runs):.4g} to {max(runs):.4g}, {len(runs)} runs" if len(runs) > 1 else "1 run"
        bound = f"{'at most' if row['below'] else 'at least'} {row['bound']:.4g}"
        met = "met" if row["met"] else "**not met**"
        cells.append((row["name"], f"{row['value']:.4g} {row['unit']}", bound, met, spread, row.get("detail", "")))
    return Table(("what", "median", "target", "", "spread", "detail"), cells)


def machine(content: dict[str, Any]) -> str:
    """A file's machine, versions, commit and load."""
    of = content["machine"]
    versions = ", ".join(f"{name} {number}" for name, number in of.get("versions", {}).items())
    load = content.get("load")
    busy = f", load average {min(load):.1f} to {max(load):.1f}" if load else ""
    return (
        f"{of['cores']} x {of['cpu']}, {of['memory_gib']} GiB, Linux {of['kernel']}, Python {of['python']}{busy};"
        f" commit {of['commit']}, {of['when']}; {versions}"
    )


def side_by_side(peers: dict[str, Any], workload: str) -> Table:
    """Each system's results on a workload: medians, and the spread of put and get together."""
    cells = []
    ours = peers["systems"].get("dataplane", {}).get("workloads", {}).get(workload)
    for of in peers["systems"].values():
        measured = of.get("workloads", {}).get(workload)
        if measured is None:
            why = of.get("error") or of.get("errors", {}).get(workload, "not measured")
            cells.append((of["title"], f"failed: {why}", *[""] * 7))
            continue
        step, gb = median(measured["step_s"]), measured["moved_bytes"] / 1e9
        times = f"{step / median(ours['step_s']):.1f}" if ours else ""
        cells.append((
            of["title"], f"{median(measured['put_s']):.4f}", f"{median(measured['get_s']):.4f}",
            f"{step:.4f} ({min(measured['step_s']):.4f} to {max(measured['step_s']):.4f})", times,
            f"{median(measured['read_s']):.4f}", f"{gb / step:.2f}", f"{median(measured['cpu_s']) / gb:.3f}",
            f"{measured['peak_bytes'] / 2**20:,.0f}",
        ))  # fmt: skip
    return Table(
        ("", "put, s", "get, s", "put and get, s", "times ours", "and every byte read, s", "GB/s",
         "processor s a GB", "peak memory, MiB"), cells
    )  # fmt: skip


def described(peers: dict[str, Any], workload: str) -> str:
    """A workload in one sentence."""
    of = peers["workloads"][workload]
    times = "once" if of["reads"] == 1 else f"{of['reads']} times"
    return f"{of['what']}: {of['nbytes'] / 1e6:,.1f} MB put, read {times}"


def not_measured(peers: dict[str, Any]) -> list[str]:
    """A sentence for each system or workload without figures: the reason, and the command that installs it."""
    said = []
    for of in peers["systems"].values():
        how = f" To get it: `{of['how']}`." if of.get("how") else ""
        if "error" in of:
            said.append(f"{of['title']}: {of['error']}.{how}")
            continue
        said += [f"{of['title']}, {workload}: {why}." for workload, why in of.get("errors", {}).items()]
    return said


def where_faster(peers: dict[str, Any]) -> list[str]:
    """A sentence for each workload on which another system is faster."""
    return [
        f"{entry['workload']}, {entry['what']}: {peers['systems'][entry['system']]['title']}"
        f" {entry['theirs_s'] * 1e3:,.1f} ms, dataplane {entry['ours_s'] * 1e3:,.1f} ms"
        for entry in peers.get("faster", [])
    ]


def versions(peers: dict[str, Any]) -> str:
    """The versions of the systems that ran."""
    said = []
    for of in peers["systems"].values():
        if of.get("versions"):
            said.append(", ".join(f"{name} {number}" for name, number in of["versions"].items()))
    return "; ".join(said)
