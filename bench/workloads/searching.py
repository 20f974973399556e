"""Search trajectories: turns of the model, with a tool's answer between adjacent turns.

The lengths of turns depend on their number. For each number of turns there are tables of each turn's tokens, and the
correlations of the turns of a trajectory. Of two turns the first is short and the last long, and the middle ones of
five are longer still. So turns drawn from one table for all trajectories would not have the trajectories' sums.

The tokens of answers are drawn from a table of their own. Then answers are redistributed once, to bring the totals near
their table: a trajectory with a total too small for its rank gets longer answers. The set of answers stays the same.
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
    called = np.delete(np.arange(turns.sum()), first)  # the turns after a tool's answer
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
    """The table's total at the rank of each total, less this total."""
    total = total + task.figures["template_tokens_per_tool_call"] * (turns - 1)
    return task.quantiles["total_tokens"].at(spread(total, source)) - total
