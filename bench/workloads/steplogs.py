"""PolyTrace's step logs: a line for each prompt of each rank, or, for its search task, for each trajectory.

A prompt's line has `step, rank, dp_rank, tp_rank, local_index, input, output, n_sampling`: the tokens of a prompt, and
those of its `n_sampling` responses. Ranks of one tensor-parallel group log the same lines: a repeated line of another
`tp_rank` is ignored. Lines with `"validate": true` are ignored, too: they belong to no training step.

A trajectory's line has `step, prompt_len, turns, tool_calls, prompt_group_id`, with the tokens and seconds of each
turn and of each call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from bench.workloads.drafting import StepDraft
from bench.workloads.located import (
    Malformed,
    all_whole,
    items,
    member,
    parse,
    record,
    seconds,
    whole,
)
from bench.workloads.trace import Step

_PLACE = ("step", "rank", "dp_rank", "tp_rank", "local_index", "n_sampling")


class Log:
    """The steps of the lines of one or several files."""

    def __init__(self) -> None:
        self._logged: dict[int, dict[tuple[Any, ...], int]] = {}
        self._drafts: dict[int, StepDraft] = {}
        self._searches: dict[int, dict[int, list[Any]]] = {}

    def add(self, text: Iterable[str]) -> None:
        """Add the lines of a file. Raises `Malformed` with the line's number."""
        for number, line in enumerate(text, 1):
            if line.strip():
                try:
                    self._line(record(parse(line), ()))
                except Malformed as error:
                    error.line = number
                    raise

    def _line(self, row: dict[str, Any]) -> None:
        if row.get("validate") is True:
            return
        if "turns" in row:
            self._trajectory(row)
        else:
            self._prompt(row)

    def _prompt(self, row: dict[str, Any]) -> None:
        step, _, dp_rank, tp_rank, index, samples = (whole(member(row, key, ()), (key,)) for key in _PLACE)
        tokens = whole(member(row, "input", ()), ("input",))
        outputs = all_whole(member(row, "output", ()), ("output",), samples)
        if not samples:
            raise Malformed(("n_sampling",), "n_sampling is 0: a prompt has one response at least")
        seen = self._logged.setdefault(step, {})
        if seen.setdefault((dp_rank, index, tokens, *outputs), tp_rank) != tp_rank:
            return
        draft = self._drafts.setdefault(step, StepDraft(step))
        draft.prompt(tokens)
        for output in outputs:
            draft.response([tokens], [output])

    def _trajectory(self, row: dict[str, Any]) -> None:
        step, group, prompt = (whole(member(row, key, ()), (key,)) for key in ("step", "prompt_group_id", "prompt_len"))
        turns = items(row["turns"], ("turns",))
        if not turns:
            raise Malformed(("turns",), "turns is empty: a trajectory has one at least")
        inputs, tool = [prompt] + [0] * (len(turns) - 1), [0.0] * len(turns)
        outputs, engine = [], []
        for i, value in enumerate(turns):
            turn, at = record(value, ("turns", i)), ("turns", i)
            outputs.append(whole(member(turn, "completion_tokens", at), (*at, "completion_tokens")))
            engine.append(seconds(member(turn, "engine_latency_s", at), (*at, "engine_latency_s")))
        for i, value in enumerate(items(member(row, "tool_calls", ()), ("tool_calls",))):
            call, at = record(value, ("tool_calls", i)), ("tool_calls", i)
            after = whole(member(call, "turn", at), (*at, "turn"))
            if after >= len(turns):
                raise Malformed((*at, "turn"), f"a tool was called in turn {after} of {len(turns)}")
            tool[after] += seconds(member(call, "latency_s", at), (*at, "latency_s"))
            answer = whole(member(call, "append_len", at), (*at, "append_len"))
            if after + 1 < len(turns):
                inputs[after + 1] += answer
        of_step = self._searches.setdefault(step, {}).setdefault(group, [])
        if of_step and of_step[0][0][0] != prompt:
            raise Malformed(("prompt_len",), f"prompt_len is {prompt}, and that of its group {of_step[0][0][0]}")
        of_step.append((inputs, outputs, 0.0, engine, tool))

    def steps(self) -> list[Step]:
        """The logged steps, in the order of their numbers."""
        for number, of_groups in self._searches.items():
            draft = self._drafts.setdefault(number, StepDraft(number))
            for group in sorted(of_groups):
                draft.prompt(of_groups[group][0][0][0])
                for response in of_groups[group]:
                    draft.response(*response)
        self._searches.clear()
        return [self._drafts[number].step() for number in sorted(self._drafts)]
