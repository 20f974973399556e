"""Trajectories that search: turns of the model, and a tool's answer between each two.

How many turns there are, and how long each is, is one draw: of each number of turns there is a table of each turn's
tokens, and how the turns of one trajectory correlate. The first turn of two is short and the last one long, the middle
ones of five are longer still, so the turns of all trajectories from one table would not sum up to the trajectories'.

The tool's tokens are drawn from a table of their own. Then its answers are dealt again, once, so that the totals come
near theirs: a trajectory whose total is too small for its rank gets longer ones. That changes which trajectory has an
answer, and not which there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.workloads.groups import normal_correlation
from bench.workloads.quantiles import Quantiles, scattered, spread, tokens
from bench.workloads.tables import Task, percentiles

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def trajectories(
    task: Task, prompts: int, samples: int, source: np.random.Generator
) -> tuple[Ints, Ints, Ints, Ints, Floats, Floats]:
    """Prompts' tokens [prompts], turns of each response, and of each turn its tokens in and out, the engine's seconds,
    and the seconds of the tool that it called."""
    counts = task.figures["turns"]
    bounds = np.cumsum(list(counts.values())) / sum(counts.values())
    responses = prompts * samples
    turns = np.searchsorted(bounds, scattered(responses, source), side="right").clip(max=len(bounds) - 1)
    turns = np.array([int(n) for n in counts])[turns]
    first = np.cumsum(turns) - turns
    called = np.delete(np.arange(turns.sum()), first)  # the turns that a tool's answer came before
    own = np.repeat(np.arange(responses), turns)

    prompt = tokens(task.quantiles["prompt_tokens"].at(scattered(prompts, source)), 1)
    inputs = np.empty(len(own), np.int64)
    inputs[first] = np.repeat(prompt, samples)
    lengths = np.empty(len(own))
    for n, model in task.figures["completion_tokens_by_turns"].items():
        of_n = np.flatnonzero(turns == int(n))
        lengths[first[of_n, None] + np.arange(int(n))] = _completions(model, len(of_n), source)
    outputs = tokens(task.quantiles["completion_tokens_per_turn"].at(spread(lengths, source)), 1)
    answers = task.quantiles["tool_response_tokens"]
    inputs[called] = tokens(answers.at(scattered(len(called), source)), 1)
    made = np.bincount(own, inputs + outputs, responses).astype(np.float64)
    short = _missing(task, made, turns, source) / np.maximum(turns - 1, 1)
    inputs[called] = tokens(answers.at(spread(inputs[called] + short[own[called]], source)), 1)

    engine = task.quantiles["engine_seconds_per_turn"].at(scattered(len(own), source))
    tool = np.zeros(len(own))
    tool[called - 1] = task.quantiles["tool_seconds"].at(scattered(len(called), source))
    return prompt, turns, inputs, outputs, engine, tool


def _completions(model: Mapping[str, Any], responses: int, source: np.random.Generator) -> Floats:
    """The model's tokens [responses, turns] of trajectories of so many turns: tables, joined by a Gaussian copula."""
    correlation = normal_correlation(np.array(model["spearman"]))
    scores = source.standard_normal((responses, len(correlation))) @ np.linalg.cholesky(correlation).T
    tables = (Quantiles.of(percentiles(), values) for values in model["quantiles"])
    drawn = [table.at(spread(scores[:, turn], source)) for turn, table in enumerate(tables)]
    return np.stack(drawn, axis=1)


def _missing(task: Task, total: Floats, turns: Ints, source: np.random.Generator) -> Floats:
    """By how much each total is less than the one that the table has at its rank."""
    total = total + task.figures["template_tokens_per_tool_call"] * (turns - 1)
    return task.quantiles["total_tokens"].at(spread(total, source)) - total
