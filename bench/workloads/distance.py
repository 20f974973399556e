"""Distances of a generated workload from the tables: two-sample Kolmogorov-Smirnov, and the similarity in groups.

The other sample is drawn here from the same tables, without code of the generator: by NumPy's linear interpolation
between percentiles, by NumPy's normals for the published mixture, and by log-normals for moments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.workloads.tables import percentiles, task
from bench.workloads.trace import Step, Trace

Floats = npt.NDArray[np.float64]

REFERENCE = 50_001
"""Values of the other sample: evenly spaced quantiles, or draws of a mixture."""


def distance(one: npt.ArrayLike, other: npt.ArrayLike) -> float:
    """The two-sample Kolmogorov-Smirnov statistic: the largest difference of the two distribution functions."""
    a, b = np.sort(np.asarray(one, np.float64)), np.sort(np.asarray(other, np.float64))
    at = np.concatenate([a, b])
    shares = np.searchsorted(a, at, "right") / len(a) - np.searchsorted(b, at, "right") / len(b)
    return float(np.abs(shares).max())


def expected(name: str, column: str) -> Floats:
    """Evenly spaced quantiles of a table."""
    values = task(name).figures["quantiles"][column]
    return np.interp(np.linspace(0, 100, REFERENCE), percentiles(), values)


def figures(trace: Trace) -> Iterator[tuple[str, Floats, Floats]]:
    """For each table or model of a generated trace: its name, the generated values, and the other sample."""
    match trace.name:
        case "math_235b":
            yield from _mixture(trace)
        case "tool_use_235b":
            yield from _calls(trace)
        case "search_7b":
            yield from ((column, made, expected(trace.name, column)) for column, made in _search(trace))
        case "image_understanding":
            yield from ((column, made, expected(trace.name, column)) for column, made in _image(trace))
        case _:
            yield "input_tokens", trace.each(lambda s: s.input_tokens), expected(trace.name, "input_tokens")
            yield "output_tokens", trace.each(lambda s: s.turn_output_tokens), expected(trace.name, "output_tokens")
    if trace.name == "code_14b":
        column = "reward_seconds_per_64_samples"
        yield column, trace.each(lambda s: s.reward_seconds[::64]), expected(trace.name, column)


def _search(trace: Trace) -> Iterator[tuple[str, Floats]]:
    per_call = task(trace.name).figures["template_tokens_per_tool_call"]

    def later(step: Step) -> npt.NDArray[np.bool_]:
        mask = np.ones(len(step.turn_input_tokens), bool)
        mask[step.offsets[:-1]] = False
        return mask

    def totals(step: Step) -> Floats:
        return step.turn_input_tokens[step.offsets[:-1]] + step.response_tokens + per_call * (step.turns - 1)

    yield "prompt_tokens", trace.each(lambda s: s.input_tokens)
    yield "total_tokens", trace.each(totals)
    yield "total_completion_tokens", trace.each(lambda s: s.of_responses(s.turn_output_tokens))
    yield "completion_tokens_per_turn", trace.each(lambda s: s.turn_output_tokens)
    yield "tool_response_tokens", trace.each(lambda s: s.turn_input_tokens[later(s)])
    yield "engine_seconds_per_turn", trace.each(lambda s: s.engine_seconds)
    yield "tool_seconds", trace.each(lambda s: s.tool_seconds[np.roll(later(s), -1)])


def _image(trace: Trace) -> Iterator[tuple[str, Floats]]:
    yield "text_tokens", trace.each(lambda s: s.input_tokens - s.vision_tokens)
    yield "image_tokens_per_image", trace.each(lambda s: s.vision_tokens / np.maximum(s.images, 1))
    yield "images_per_prompt", trace.each(lambda s: s.images)
    yield "output_tokens", trace.each(lambda s: s.turn_output_tokens)


def _mixture(trace: Trace) -> Iterator[tuple[str, Floats, Floats]]:
    model, source = task(trace.name).figures, np.random.default_rng(1)
    counts = source.multinomial(REFERENCE, np.array(model["weights"]) / sum(model["weights"]))
    drawn = [
        source.multivariate_normal(mean, covariance, n)
        for mean, covariance, n in zip(model["means"], model["covariances"], counts, strict=True)
    ]
    pairs = np.clip(np.rint(np.concatenate(drawn)), 1, model["output_clip"])
    yield "input", trace.each(lambda s: s.input_tokens), pairs[:, 0]
    yield "output", trace.each(lambda s: s.turn_output_tokens), pairs[:, 1]


def _calls(trace: Trace) -> Iterator[tuple[str, Floats, Floats]]:
    model, source = task(trace.name).figures, np.random.default_rng(1)
    calls = sum(model["calls"].values())
    drawn: dict[str, list[Any]] = {"input": [], "output": []}
    for n, count in model["calls"].items():
        for part in drawn:
            for mean, deviation in model["tokens_per_call"][n][part]:
                variance = np.log1p((deviation / mean) ** 2)
                size = max(1, round(REFERENCE * count / calls))
                values = source.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), size)
                drawn[part].append(np.maximum(np.rint(values), 1))
    turns = np.repeat(*np.array([[int(n), count] for n, count in model["calls"].items()]).T)
    yield "calls", trace.each(lambda s: s.turns), turns
    yield "input per call", trace.each(lambda s: s.turn_input_tokens), np.concatenate(drawn["input"])
    yield "output per call", trace.each(lambda s: s.turn_output_tokens), np.concatenate(drawn["output"])


# Groups


def ranks(values: Floats) -> Floats:
    """The ranks of the values, from 1. Equal values have the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[which]


def spearman(one: Floats, other: Floats) -> float:
    """Spearman's rank correlation."""
    return float(np.corrcoef(ranks(one), ranks(other))[0, 1])


def alike(trace: Trace, samples: int) -> dict[str, float]:
    """The rank correlations of siblings and of prompt and response, and the deviations of the logarithm of responses'
    lengths between prompts and within one (by the analysis of variance)."""
    outputs = trace.each(lambda s: s.turn_output_tokens).reshape(-1, samples)
    inputs = np.repeat(trace.each(lambda s: s.input_tokens), samples)
    i, j = np.nonzero(~np.eye(samples, dtype=bool))
    logs = np.log(np.maximum(outputs, 1))
    within = logs.var(axis=1, ddof=1).mean()
    between = logs.mean(axis=1).var(ddof=1) - within / samples
    return {
        "sibling_spearman": spearman(outputs[:, i].ravel(), outputs[:, j].ravel()),
        "input_output_spearman": spearman(inputs, outputs.ravel()),
        "output_log_std_between_prompts": float(np.sqrt(max(between, 0))),
        "output_log_std_within_prompt": float(np.sqrt(within)),
    }
