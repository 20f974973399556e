"""Plans as pictures: one line a worker, time from left to right, as text and as SVG. Several plans share one scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from dataplane.pipeline import programs
from dataplane.pipeline.plans import Plan, Prediction

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
_PASSES = {
    programs.FORWARD: ("F", "#4c78a8", "forward"),
    programs.BACKWARD: ("B", "#54a24b", "backward"),
    programs.BACKWARD_INPUT: ("B", "#54a24b", "backward, input"),
    programs.BACKWARD_WEIGHT: ("w", "#eeca3b", "backward, weights"),
}
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_IDLE = "·"


@dataclass(frozen=True)
class DrawnPlan:
    """A plan, its prediction, and the names of its stages (none for a model)."""

    title: str
    plan: Plan
    predicted: Prediction
    stages: tuple[str, ...] = ()

    def head(self) -> str:
        """One line: the title, the schedule and the predicted values."""
        gap = f", {self.predicted.gap:.1%} above the lower bound" if self.predicted.bound_s else ""
        return (
            f"{self.title}: {self.plan.schedule}; {self.predicted.step_s:.4g} s a step, "
            f"bubbles {self.predicted.bubble:.1%}{gap}"
        )

    def tasks(self) -> Iterator[tuple[int, float, float, str, str, str]]:
        """Worker, start, end, letter, colour and label of each instruction."""
        outcome = self.predicted.outcome
        for i, each in enumerate(self.plan.instructions):
            if each.kind == programs.RUN:
                letter, colour = _LETTERS[each.stage % 26], _COLOURS[each.stage % len(_COLOURS)]
                label = self.stages[each.stage] if self.stages else f"stage {each.stage}"
            else:
                letter, colour, label = _PASSES[each.kind]
                label = f"{label} of chunk {each.stage}"
            label = f"{label}, micro-batch {each.micro}"
            yield int(outcome.worker[i]), float(outcome.start[i]), float(outcome.end[i]), letter, colour, label


def text(shown: Sequence[DrawnPlan], width: int = 100) -> str:
    """The plans one below another, with `width` characters of time. A character is the worker's longest activity in its
    interval."""
    longest = _longest(shown)
    lines: list[str] = []
    for each in shown:
        lines += [each.head(), *_lines(each, width, longest), ""]
    return "\n".join([*lines, _legend(shown)])


def _longest(shown: Sequence[DrawnPlan]) -> float:
    """The seconds of the longest plan; 1 if no stage takes any time."""
    return max(each.predicted.outcome.makespan for each in shown) or 1.0


def _lines(shown: DrawnPlan, width: int, longest: float) -> list[str]:
    workers = shown.plan.cluster.workers
    letters = sorted({task[3] for task in shown.tasks()})
    share = np.zeros((workers, width, len(letters)))
    for worker, start, end, letter, _, _ in shown.tasks():
        a, b = start / longest * width, end / longest * width
        cells = np.arange(int(a), min(width, int(np.ceil(b))))
        share[worker, cells, letters.index(letter)] += np.minimum(b, cells + 1) - np.maximum(a, cells)
    found = []
    for worker in range(workers):
        idle = 1 - share[worker].sum(axis=1)
        most = share[worker].argmax(axis=1)
        taken = share[worker].max(axis=1) >= idle
        found.append(f"{worker:>3} " + "".join(letters[m] if t else _IDLE for m, t in zip(most, taken, strict=True)))
    return found


def _legend(shown: Sequence[DrawnPlan]) -> str:
    if shown[0].stages:
        return ", ".join(f"{_LETTERS[i % 26]} {name}" for i, name in enumerate(shown[0].stages)) + f", {_IDLE} idle"
    return f"F forward, B backward (of the input, where w follows), w backward of the weights, {_IDLE} idle"


def svg(shown: Sequence[DrawnPlan], width: int = 1200) -> str:
    """The plans one below another, as an SVG document. Each instruction has a tooltip."""
    longest = _longest(shown)
    left, line, gap = 44, 16 if shown[0].plan.cluster.workers <= 32 else 8, 34
    scale = (width - left - 10) / longest
    body: list[str] = []
    top = 0
    for each in shown:
        body.append(f'<text x="8" y="{top + 20}" font-weight="bold">{escape(each.head())}</text>')
        top += gap - 4
        for worker in range(each.plan.cluster.workers):
            y = top + worker * line
            body.append(f'<text x="8" y="{y + line - 4}" font-size="10">{worker}</text>')
            body.append(f'<rect x="{left}" y="{y}" width="{longest * scale:.1f}" height="{line - 2}" fill="#f0f0f0"/>')
        for worker, start, end, _, colour, label in each.tasks():
            x, wide = left + start * scale, max((end - start) * scale, 0.3)
            body.append(
                f'<rect x="{x:.2f}" y="{top + worker * line}" width="{wide:.2f}" height="{line - 2}" fill="{colour}" '
                f'stroke="white" stroke-width="0.3"><title>{escape(label)}: {start:.4g} to {end:.4g} s</title></rect>'
            )
        top += each.plan.cluster.workers * line + gap // 2
    x = 8
    for name, colour in _colours(shown[0]):
        body.append(f'<rect x="{x}" y="{top + 4}" width="12" height="12" fill="{colour}"/>')
        body.append(f'<text x="{x + 16}" y="{top + 14}" font-size="11">{escape(name)}</text>')
        x += 28 + 7 * len(name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + 24}" font-family="sans-serif" '
        f'font-size="13">\n<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _colours(shown: DrawnPlan) -> list[tuple[str, str]]:
    if shown.stages:
        return [(name, _COLOURS[i % len(_COLOURS)]) for i, name in enumerate(shown.stages)]
    kinds = {each.kind for each in shown.plan.instructions}
    return [(name, colour) for kind, (_, colour, name) in _PASSES.items() if kind in kinds]
