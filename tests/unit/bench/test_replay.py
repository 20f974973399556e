"""`bench.replay`: rows and bytes that are not those of the plan are found."""

from __future__ import annotations

import numpy as np
import pytest

import dataplane as dp
from bench.replaying import payloads
from bench.replaying.plan import Pace, Plan, Ranks
from bench.replaying.running import Broken, Replayed, check
from bench.workloads import Step, Trace
from tests.cases import each_case

PACE = Pace(token_s=0.1, reference_token_s=0.01, train_token_s=0.02)


def a_plan(rows: int) -> Plan:
    """A worker of one slot, a rank of each stage, and a step of so many prompts, each with a response of one turn."""
    nothing, ones, tens = np.zeros(rows, np.int64), np.ones(rows, np.int64), np.full(rows, 10)
    step = Step(
        0,
        input_tokens=tens,
        vision_tokens=nothing,
        images=nothing,
        patches=nothing,
        group=np.arange(rows),
        reward_seconds=np.zeros(rows),
        turns=ones,
        turn_input_tokens=tens,
        turn_output_tokens=tens,
        engine_seconds=np.zeros(rows),
        tool_seconds=np.zeros(rows),
    )
    return Plan(Trace("hand-made", "text", "here", (step,)), pace=PACE, workers=1, slots=1, trainer=Ranks(1, 1))


def test_a_replay_detects_rows_with_altered_bytes() -> None:
    columns = {"input_ids": [payloads.tokens(50, 1), payloads.tokens(40, 2)], "row": np.array([1, 2])}
    sums = np.zeros((2, 4), np.int64)
    sums[:, 0] = [payloads.checksum(array) for array in columns["input_ids"]]
    with dp.connect(config=dp.NodeConfig(memory="64MiB", spill=0, prewarm=0)) as plane:
        assert payloads.check(plane.get(plane.put({**columns, "sums": sums})), ["input_ids"]) == 90 * 8
        sums[1, 0] += 1
        with pytest.raises(payloads.Differs, match="input_ids of row 2"):
            payloads.check(plane.get(plane.put({**columns, "sums": sums})), ["input_ids"])


@each_case("rows", [[0, 1], [0, 1, 1], [0, 1, 2, 2], [0, 1, 3]])
def test_a_replay_detects_missed_and_duplicated_rows(rows: list[int]) -> None:
    plan = a_plan(3)
    whole = [0, 1, 2]
    found = Replayed(seen={"rollout 0": whole, "reward": whole, "reference 0.0": whole, "trainer 0.0": whole})
    check(plan, found)
    found.seen["trainer 0.0"] = rows
    with pytest.raises(Broken, match=r"trainer\.0"):
        check(plan, found)
