"""Draws the figures as PNG bytes, by matplotlib. Without figures, a sentence with the reason takes the place of a
picture."""

from __future__ import annotations

import io
from collections.abc import Callable
from statistics import median
from typing import Any

from bench.report.results import EXPECTED, Results

STEP = "video"


class NoFigures(Exception):
    """The file for a picture does not exist, or has no figures for it; the text says which."""


def _file(results: Results, name: str) -> dict[str, Any]:
    if name not in results.files:
        raise NoFigures(f"there is no {name}.json; `{EXPECTED[name][1]}` makes it")
    return results.files[name]


def throughput(results: Results, axes: Any) -> None:
    """Draw the rate of put and get of dense batches, by size. All plots raise `NoFigures`."""
    peers = _file(results, "peers")
    dense = {name: of["nbytes"] for name, of in peers["workloads"].items() if name.startswith("dense")}
    drawn = False
    for of in peers["systems"].values():
        there = sorted((size, of["workloads"][name]) for name, size in dense.items() if name in of.get("workloads", {}))
        if there:
            rates = [measured["moved_bytes"] / median(measured["step_s"]) / 1e9 for _, measured in there]
            axes.plot([size / 1e6 for size, _ in there], rates, "o-", label=of["title"])
            drawn = True
    if not drawn:
        raise NoFigures("peers.json has no dense workload")
    axes.set(xscale="log", yscale="log", xlabel="MB", ylabel="GB/s, put and get")
    axes.legend(fontsize="small")


def memory(results: Results, axes: Any) -> None:
    """Draw the memory of all processes of each system during the first step of the video task."""
    drawn = False
    for of in _file(results, "peers")["systems"].values():
        measured = of.get("workloads", {}).get(STEP)
        if measured:
            axes.plot(*zip(*[(s, b / 2**20) for s, b in measured["memory"]], strict=True), label=of["title"])
            drawn = True
    if not drawn:
        raise NoFigures("peers.json has no step of the video task")
    axes.set(xlabel="s", ylabel="MiB, all processes", ylim=(0, None))
    axes.legend(fontsize="small")


def _replayed(results: Results) -> dict[str, dict[str, Any]]:
    for of in _file(results, "replay").values():
        if isinstance(of, dict) and of.get("runs"):
            spent: dict[str, dict[str, Any]] = of["runs"][-1].get("spent", {})
            if spent:
                return spent
    raise NoFigures("replay.json has no run that says where its time went")


def stalls(results: Results, axes: Any) -> None:
    """Draw the time of each process of a replayed training job, by kind."""
    spent = _replayed(results)
    kinds = sorted({kind for of in spent.values() for kind in of if kind.endswith("_s")})
    left = [0.0] * len(spent)
    for kind in kinds:
        width = [of.get(kind, 0.0) for of in spent.values()]
        axes.barh(list(spent), width, left=left, label=kind.removesuffix("_s"))
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set(xlabel="s")
    axes.legend(fontsize="small")


def moved(results: Results, axes: Any) -> None:
    """Draw the bytes that each process of a replayed training job wrote and read."""
    spent = _replayed(results)
    left = [0.0] * len(spent)
    for kind in ("written_bytes", "read_bytes"):
        width = [of.get(kind, 0) / 1e6 for of in spent.values()]
        axes.barh(list(spent), width, left=left, label=kind.removesuffix("_bytes"))
        left = [a + b for a, b in zip(left, width, strict=True)]
    axes.set(xlabel="MB")
    axes.legend(fontsize="small")


def scaling(results: Results, axes: Any) -> None:
    """Draw the load of a stream's leader by the number of hosts. `scaling` of scale.json has the axes' names and points
    by series."""
    of = _file(results, "scale").get("scaling")
    if not of:
        raise NoFigures("scale.json has no points")
    for name, points in of["series"].items():
        axes.plot(*zip(*points, strict=True), "o-", label=name)
    axes.set(xscale="log", yscale="log", xlabel=of["x"], ylabel=of["y"])
    axes.legend(fontsize="x-small")


PLOTS: dict[str, Callable[[Results, Any], None]] = {
    "Throughput by size": throughput,
    "Memory over time": memory,
    "Where time is spent": stalls,
    "Bytes moved": moved,
    "Scaling": scaling,
}


def drawn(results: Results) -> dict[str, bytes | str]:
    """By title, the picture as PNG, or why there is none."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return dict.fromkeys(PLOTS, "matplotlib is not installed; pip install matplotlib")
    made: dict[str, bytes | str] = {}
    for title, plot in PLOTS.items():
        figure = Figure(figsize=(7, 3.6), layout="constrained")
        try:
            plot(results, figure.subplots())
        except NoFigures as error:
            made[title] = str(error)
            continue
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110)
        made[title] = png.getvalue()
    return made
