"""A trace as text and as a plot: the output of `python -m bench.workloads`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bench.workloads.trace import Floats, Trace
from dataplane.config import format_size

_PERCENTILES = (1, 10, 50, 90, 99)


def series(trace: Trace) -> Iterator[tuple[str, Floats]]:
    """The figures of the trace, by name."""
    pictures = any(step.images.any() for step in trace.steps)
    turn = " a turn" if trace.multi_turn else ""
    yield "input tokens, a prompt", trace.each(lambda s: s.input_tokens)
    if trace.multi_turn:
        yield "turns, a response", trace.each(lambda s: s.turns)
        yield "tokens of tools, an answer", trace.each(lambda s: np.delete(s.turn_input_tokens, s.offsets[:-1]))
    yield f"output tokens,{turn or ' a response'}", trace.each(lambda s: s.turn_output_tokens)
    if pictures:
        yield "images or videos, a prompt", trace.each(lambda s: s.images)
        yield "patches, a prompt", trace.each(lambda s: s.patches)
    if any(step.engine_seconds.any() for step in trace.steps):
        yield f"engine seconds,{turn or ' a response'}", trace.each(lambda s: s.engine_seconds)
    if any(step.tool_seconds.any() for step in trace.steps):
        yield "tool seconds, a call", trace.each(lambda s: np.delete(s.tool_seconds, s.offsets[1:] - 1))
    if any(step.reward_seconds.any() for step in trace.steps):
        yield "reward seconds, a response", trace.each(lambda s: s.reward_seconds)


def text(trace: Trace) -> str:
    """The trace's sizes, the quantiles of each series, and the totals, as text."""
    prompts, responses = (sum(getattr(step, of) for step in trace.steps) for of in ("prompts", "responses"))
    steps = f"{len(trace.steps)} steps" if len(trace.steps) > 1 else "1 step"
    lines = [
        f"{trace.name} ({trace.modality}): {steps}, {prompts:,} prompts, {responses:,} responses",
        f"from {trace.source}",
        "",
        f"{'':<28}" + "".join(f"{f'p{p}':>9}" for p in _PERCENTILES) + f"{'most':>9}{'mean':>10}",
    ]
    for name, values in series(trace):
        if len(values):
            cells = [*np.percentile(values, _PERCENTILES), values.max()]
            number = "{:>9,.2f}" if "seconds" in name else "{:>9,.0f}"
            lines.append(f"{name:<28}" + "".join(number.format(x) for x in cells) + f"{values.mean():>10,.1f}")
    return "\n".join([*lines, "", *_totals(trace)])


def _totals(trace: Trace) -> Iterator[str]:
    into = sum(int(step.input_tokens[step.group].sum()) for step in trace.steps)
    tools = sum(int(step.response_tokens.sum() - step.turn_output_tokens.sum()) for step in trace.steps)
    made = sum(int(step.turn_output_tokens.sum()) for step in trace.steps)
    yield f"tokens    {into:,} in prompts, once a response; {tools:,} of tools; {made:,} made"
    size = sum(step.text_bytes for step in trace.steps)
    yield f"text      {format_size(size)} in verl's 13 columns, {format_size(size / len(trace.steps))} a step"
    if pixels := sum(step.patch_bytes for step in trace.steps):
        again = sum(step.repeated_patch_bytes for step in trace.steps)
        a_step = format_size(pixels / len(trace.steps))
        yield f"pixels    {format_size(pixels)} once a prompt, {a_step} a step; {format_size(again)} once a response"


def plot(trace: Trace, path: Path) -> None:
    """Plot the distribution function of each series to a file. Raises ValueError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a plot needs matplotlib: pip install 'rollout-dataplane[demo]'") from None

    shown = [(name, values) for name, values in series(trace) if len(values)]
    rows = -(-len(shown) // 3)
    figure = Figure(figsize=(12, 0.6 + 2.8 * rows), layout="constrained")
    for axes, (name, values) in zip(figure.subplots(rows, 3, squeeze=False).ravel(), shown, strict=False):
        positive = values.min() > 0 and values.max() > 20 * np.median(values)
        axes.step(np.sort(values), (np.arange(len(values)) + 1) / len(values), where="post", linewidth=1.5)
        axes.set_xscale("log" if positive else "linear")
        axes.set_xlabel(name)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.3)
    for axes in figure.axes[len(shown) :]:
        axes.remove()
    figure.suptitle(f"{trace.name}: shares below")
    figure.savefig(path, dpi=120)
