"""PolyTrace's files of lengths: an object with a step under each number (its README).

A step of single turns is `{"input": [...], "output": [...]}`, with an entry for each response. If outputs are a
multiple of inputs, the responses of each prompt follow each other. A step of several turns is a list of sessions of the
same form, with an entry for each turn.

`write` adds other arrays of `Step` under their names if they are not zero, and `group`. Other readers ignore them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, Literal

from bench.workloads.drafting import StepDraft
from bench.workloads.located import (
    Malformed,
    Path,
    all_seconds,
    all_whole,
    items,
    member,
    record,
    seconds,
    shown,
    shown_path,
    whole,
)
from bench.workloads.trace import Step, Trace

Unpaired = Literal["refuse", "cycle"]

_OF_PROMPTS = ("vision_tokens", "images", "patches")


def steps(data: Any, group_size: int | None, unpaired: Unpaired) -> list[Step]:
    """The steps of a parsed file, in the order of their numbers. Raises `Malformed`."""
    found: dict[int, Step] = {}
    for key, value in record(data, ()).items():
        if not (key.isascii() and key.isdigit() and len(key) < 19) or int(key) in found:
            raise Malformed((key,), f"{shown(key)} is not the number of a step, or there twice")
        draft = StepDraft(int(key))
        if isinstance(value, list):
            _sessions(draft, value, (key,), group_size)
        else:
            _single(draft, record(value, (key,)), (key,), group_size, unpaired)
        found[int(key)] = draft.step()
    return [found[number] for number in sorted(found)]


def _single(draft: StepDraft, row: dict[str, Any], path: Path, group_size: int | None, unpaired: Unpaired) -> None:
    outputs = all_whole(member(row, "output", path), (*path, "output"))
    inputs = all_whole(member(row, "input", path), (*path, "input"))
    n, prompts = len(outputs), len(inputs)
    if prompts and n > prompts and n % prompts == 0:
        group_size = n // prompts
        inputs = [tokens for tokens in inputs for _ in range(n // prompts)]
    elif n != prompts:
        if unpaired == "refuse" or not prompts:
            raise Malformed(
                path,
                f"{shown_path(path)} has {prompts} inputs and {n} outputs, which are not of one another. "
                "To use each input in turn, write read(path, unpaired='cycle')",
            )
        inputs = [inputs[i % prompts] for i in range(n)]
    group = _groups(row, path, inputs, group_size)
    of_prompts = {k: all_whole(row[k], (*path, k), group[-1] + 1 if n else 0) for k in _OF_PROMPTS if k in row}
    of_turns = {k: all_seconds(row[k], (*path, k), n) for k in ("reward_seconds", "engine_seconds") if k in row}
    for i in range(n):
        if i == 0 or group[i] != group[i - 1]:
            draft.prompt(inputs[i], **{k: v[group[i]] for k, v in of_prompts.items()})
        reward = of_turns["reward_seconds"][i] if "reward_seconds" in of_turns else 0.0
        engine = of_turns["engine_seconds"][i : i + 1] if "engine_seconds" in of_turns else ()
        draft.response([inputs[i]], [outputs[i]], reward, engine)


def _groups(row: dict[str, Any], path: Path, inputs: list[int], group_size: int | None) -> list[int]:
    """The prompt of each response: that of the file, else by `group_size`, else one for each."""
    n = len(inputs)
    if "group" in row:
        group = all_whole(row["group"], (*path, "group"), n)
    else:
        size = group_size or 1
        if n % size:
            raise Malformed((*path, "output"), f"{shown_path(path)} has {n} responses, which are not groups of {size}")
        group = [i // size for i in range(n)]
    for i in range(n):
        _check_group(group[i], group[i - 1] if i else -1, (*path, "group", i))
        if i and group[i] == group[i - 1] and inputs[i] != inputs[i - 1]:
            raise Malformed((*path, "input", i), f"{shown_path((*path, 'input', i))} differs from its group's")
    return group


def _check_group(value: int, before: int, path: Path) -> None:
    if not before <= value <= before + 1 or value < 0:
        raise Malformed(path, f"{shown_path(path)} is {value} after {before}: groups count up from 0")


def _sessions(draft: StepDraft, rows: list[Any], path: Path, group_size: int | None) -> None:
    size, before = group_size or 1, -1
    if len(rows) % size:
        raise Malformed(path, f"{shown_path(path)} has {len(rows)} sessions, which are not groups of {size}")
    for i, value in enumerate(rows):
        at = (*path, i)
        row = record(value, at)
        outputs = all_whole(member(row, "output", at), (*at, "output"))
        inputs = all_whole(items(member(row, "input", at), (*at, "input"), len(outputs)), (*at, "input"))
        if not outputs:
            raise Malformed(at, f"{shown_path(at)} has no turn")
        group = whole(row["group"], (*at, "group")) if "group" in row else i // size
        _check_group(group, before, (*at, "group"))
        if group != before:
            draft.prompt(inputs[0], **{k: whole(row[k], (*at, k)) for k in _OF_PROMPTS if k in row})
            first = inputs[0]
        elif inputs[0] != first:
            raise Malformed((*at, "input", 0), f"{shown_path((*at, 'input', 0))} differs from its group's")
        before = group
        given = ("engine_seconds", "tool_seconds")
        latencies = {k: all_seconds(row[k], (*at, k), len(outputs)) for k in given if k in row}
        draft.response(inputs, outputs, seconds(row.get("reward_seconds", 0), (*at, "reward_seconds")), **latencies)


# Writing


def lines(trace: Trace) -> Iterator[str]:
    """The file's text, with a line for each step, or for each session, so that errors have useful lines."""
    yield "{\n"
    for i, step in enumerate(trace.steps):
        end = ",\n" if i + 1 < len(trace.steps) else "\n"
        if trace.multi_turn:
            sessions = ",\n".join(json.dumps(row) for row in _session_rows(step))
            yield f'"{step.number}": [\n{sessions}\n]{end}'
        else:
            yield f'"{step.number}": {json.dumps(_single_row(step))}{end}'
    yield "}\n"


def _single_row(step: Step) -> dict[str, Any]:
    row = {"input": step.input_tokens[step.group], "output": step.turn_output_tokens, "group": step.group}
    others = {name: getattr(step, name) for name in (*_OF_PROMPTS, "reward_seconds", "engine_seconds")}
    return {k: v.tolist() for k, v in (row | {k: v for k, v in others.items() if v.any()}).items()}


def _session_rows(step: Step) -> Iterator[dict[str, Any]]:
    offsets, group = step.offsets.tolist(), step.group.tolist()
    for i, (start, end) in enumerate(pairwise(offsets)):
        row: dict[str, Any] = {
            "input": step.turn_input_tokens[start:end].tolist(),
            "output": step.turn_output_tokens[start:end].tolist(),
            "group": group[i],
        }
        for name in ("engine_seconds", "tool_seconds"):
            if (of_turns := getattr(step, name)[start:end]).any():
                row[name] = of_turns.tolist()
        others = {"reward_seconds": step.reward_seconds[i]} | {k: getattr(step, k)[group[i]] for k in _OF_PROMPTS}
        yield row | {name: value.item() for name, value in others.items() if value}
