"""The figures as a picture: how busy nodes are, by hosts, and rows a second beside a controller's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.scale.outcome import Outcome

_COLOURS = {"greet": "C3", "append": "C0", "take": "C2", "watch": "C1", "ack": "C4", "settle": "C5", "limits": "C6"}


def draw(path: Path, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Write a PNG of these jobs, each at some numbers of hosts. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(12, 4.5))
    left, right = axes
    for name, found in outcomes.items():
        hosts = [each.job["hosts"] for each in found]
        left.plot(hosts, [each.node_busiest for each in found], "o-", label=name)
        right.plot(hosts, [each.rows_s or float("nan") for each in found], "o-", label=name)
    first = next(iter(outcomes.values()))
    hosts = [each.job["hosts"] for each in first]
    left.plot(hosts, [each.by_kind.get("greet", 0.0) for each in first], "k--", label="greetings alone")
    left.axhline(1.0, color="grey", linewidth=0.8)
    right.axhline(first[0].controller_rows_s, color="grey", label="one controller, metadata alone, at most")
    for axis, title, unit in (
        (left, "the busiest node", "share of one core, of the offered work"),
        (right, "rows a second, all hosts together", "rows/s"),
    ):
        axis.set(xscale="log", yscale="log", xlabel="hosts", ylabel=unit, title=title)
        axis.set_xticks(hosts, [str(each) for each in hosts])
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
