"""PolyTrace's files: what they say, and what is said of those that are broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.workloads import TASKS, generate, read, write
from bench.workloads.trace import ARRAYS
from dataplane.errors import SchemaMismatch
from tests.cases import each_case

# Lines as PolyTrace's logs of a video task and of its search task have them.
PROMPT = {
    "step": 1, "rank": 0, "dp_rank": 0, "tp_rank": 0, "local_index": 0, "input": 1066,
    "output": [201, 182, 179, 176, 159, 166, 202, 282], "n_sampling": 8, "validate": False,
}  # fmt: skip
SEARCH = {
    "step": 1, "prompt_len": 316, "prompt_group_id": 0, "sample_id": 0, "validate": False,
    "turns": [
        {"turn": 0, "completion_tokens": 28, "engine_latency_s": 55.1},
        {"turn": 1, "completion_tokens": 84, "engine_latency_s": 167.5},
    ],
    "tool_calls": [{"turn": 0, "latency_s": 1.5, "response_token_len": 520, "append_len": 534}],
}  # fmt: skip


def saved(path: Path, *lines: Any) -> Path:
    """A file of such lines: text as it is, other values as JSON."""
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


# Files of lengths


@each_case("name", TASKS)
def test_what_was_written_is_read_again(name: str, file: Path) -> None:
    made = generate(name, prompts=12, steps=2, seed=5)
    write(made, file)
    again = read(file)
    assert len(again.steps) == 2
    for one, other in zip(made.steps, again.steps, strict=True):
        for array in ARRAYS:
            assert np.array_equal(getattr(one, array), getattr(other, array)), array


# Broken files


def refused(path: Path, line: int, what: str) -> SchemaMismatch:
    with pytest.raises(SchemaMismatch) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert what in str(caught.value)
    return caught.value


@each_case(
    ("lines", "line", "what"),
    [
        ([""], 1, "cut short"),
        (["{}"], 1, "no steps"),
        (['{"0": {"input": [1], "output": [2]},', '"x": 3}'], 2, '"x" is not the number of a step'),
        (['{"0": {"input": [1], "output": [2]},', '"0": {"input": [1], "output": [2]}}'], 2, '"0" is there twice'),
        (['{"0": {', '"output": [1]', "}}"], 1, '"input" is missing'),
        (['{"0": {"input": [1, 2,', '"3"], "output": [1, 2, 3]}}'], 2, '["0"]["input"][2] is "3"'),
        (['{"0": {"input": [-1], "output": [1]}}'], 1, "is -1, not"),
        (['{"0": {"input": [NaN], "output": [1]}}'], 1, "is NaN, not"),
        (['{"0": {"input": [1e30], "output": [1]}}'], 1, "not an integer"),
        (['{"0": {"input": [99999999999999999999], "output": [1]}}'], 1, "not an integer"),
        (['{"0":', '{"input": [' + "9" * 5000 + '], "output": [1]}}'], 2, "too many digits"),
        (['{"0":', "[" * 100_000], 2, "too deeply"),
        (['{"0": [', '{"input": [1], "output": [1]},', '{"input": [1, 2], "output": [1]}]}'], 3, "1 belong there"),
        (['{"0": [', '{"input": [1], "output": [1], "tool_seconds": [-1]}]}'], 2, "not seconds"),
        (['{"0": {"input": [1, 2], "output": [1, 2],', '"group": [0, 2]}}'], 2, "is 2 after 0"),
        (['{"0": {"input": [1], "output": [2]}', '"1": 5}'], 2, "not JSON"),
        ([PROMPT, PROMPT | {"input": "12"}], 2, 'is "12", not an integer'),
        ([PROMPT, {k: v for k, v in PROMPT.items() if k != "n_sampling"}], 2, '"n_sampling" is missing'),
        ([PROMPT, PROMPT | {"n_sampling": 7}], 2, "has 8 values, and 7 belong there"),
        ([PROMPT, "nonsense"], 2, "not JSON"),
        ([SEARCH, SEARCH | {"prompt_len": 5}], 2, "prompt_len is 5, and that of its group 316"),
        ([SEARCH, SEARCH | {"tool_calls": [{"turn": 2, "latency_s": 1, "append_len": 1}]}], 2, "in turn 2 of 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_file_and_line(lines: list[Any], line: int, what: str, file: Path) -> None:
    refused(saved(file, *lines), line, what)
