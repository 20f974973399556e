"""`bench.replay`: what is implied, by hand; what does not fit, said before; a small replay of each mode, and of a
process that dies."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from bench import replay
from bench.replaying import payloads
from bench.replaying.plan import Pace, Plan, Ranks
from bench.replaying.running import Broken, Replayed, check
from bench.workloads import Step, Trace, generate, write
from tests.cases import each_case

PACE = Pace(token_s=0.1, reference_token_s=0.01, train_token_s=0.02)


def a_step(
    number: int, outputs: list[int], samples: int = 1, *, prompt: int = 10, reward: float = 0.0, tool: float = 0.0
) -> Step:
    """A step of prompts of so many tokens, and responses of one turn."""
    rows = len(outputs)
    prompts = rows // samples
    return Step(
        number,
        input_tokens=np.full(prompts, prompt),
        vision_tokens=np.zeros(prompts, np.int64),
        images=np.zeros(prompts, np.int64),
        patches=np.zeros(prompts, np.int64),
        group=np.repeat(np.arange(prompts), samples),
        reward_seconds=np.full(rows, reward),
        turns=np.ones(rows, np.int64),
        turn_input_tokens=np.full(rows, prompt),
        turn_output_tokens=np.array(outputs),
        engine_seconds=np.zeros(rows),
        tool_seconds=np.full(rows, tool),
    )


def a_plan(*steps: Step, **how: Any) -> Plan:
    """One worker of one slot, one rank of each stage, unless said otherwise."""
    settings: dict[str, Any] = {"pace": PACE, "workers": 1, "slots": 1, "trainer": Ranks(1, 1), **how}
    return Plan(Trace("hand-made", "text", "here", steps), **settings)


@pytest.fixture(scope="session", autouse=True)
def _warm_barriers() -> None:
    """What multiprocessing keeps for as long as the process lives: the memory of its barriers."""
    multiprocessing.get_context("spawn").Barrier(1)


# What it will not do


def test_bytes_that_are_not_those_written_are_found() -> None:
    columns = {"input_ids": [payloads.tokens(50, 1), payloads.tokens(40, 2)], "row": np.array([1, 2])}
    sums = np.zeros((2, 4), np.int64)
    sums[:, 0] = [payloads.checksum(array) for array in columns["input_ids"]]
    with dp.connect(config=dp.NodeConfig(memory="64MiB", spill=0, prewarm=0)) as plane:
        assert payloads.check(plane.get(plane.put({**columns, "sums": sums})), ["input_ids"]) == 90 * 8
        sums[1, 0] += 1
        with pytest.raises(payloads.Differs, match="input_ids of row 2"):
            payloads.check(plane.get(plane.put({**columns, "sums": sums})), ["input_ids"])


@each_case("rows", [[0, 1], [0, 1, 1], [0, 1, 2, 2], [0, 1, 3]])
def test_a_row_that_is_missed_or_given_twice_is_found(rows: list[int]) -> None:
    plan = a_plan(a_step(0, [10, 10, 10]))
    whole = [0, 1, 2]
    found = Replayed(seen={"rollout 0": whole, "reward": whole, "reference 0.0": whole, "trainer 0.0": whole})
    check(plan, found)
    found.seen["trainer 0.0"] = rows
    with pytest.raises(Broken, match=r"trainer\.0"):
        check(plan, found)


# The processes


@pytest.mark.long
def test_the_command_prints_and_keeps_what_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    write(generate("math_dapo_32b", prompts=2, samples=4, steps=1), file)
    arguments = [
        str(file),
        "--mode",
        "async",
        "--workers",
        "1",
        "--trainer",
        "1",
        "--speed",
        "100",
        "--memory",
        "64MiB",
    ]
    arguments += ["--spill", "0", "--spill-dir", str(tmp_path), "--json", str(tmp_path / "replay.json")]
    assert replay.main(arguments) in (0, 1)  # so fast, starting an update takes longer than the update
    said = capsys.readouterr().out
    assert "all rows verified" in said
    assert "trainer 0.0" in said
    kept = json.loads((tmp_path / "replay.json").read_text())
    assert {row["unit"] for row in kept["rows"]} == {"%", "MiB"}
    assert kept["asynchronous, lag 1"]["plan"]["rows"] == 8
    assert kept["asynchronous, lag 1"]["runs"][0]["spent"]["trainer 0.0"]["read_bytes"] > 0
