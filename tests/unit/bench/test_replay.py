"""`bench.replay`: what is implied, by hand; what does not fit, said before; a small replay of each mode, and of a
process that dies."""

from __future__ import annotations

import json
import multiprocessing
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import dataplane as dp
from bench import replay
from bench.replaying import payloads, report
from bench.replaying.fitting import why_not
from bench.replaying.implied import implied
from bench.replaying.plan import Pace, Plan, Ranks
from bench.replaying.running import Broken, Replayed, check, run
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


# What is implied


def test_two_slots_and_two_workers_make_two_at_a_time() -> None:
    step = a_step(0, [10, 20, 30])
    assert implied(a_plan(step, slots=2)).made == pytest.approx({0: 1.0, 1: 2.0, 2: 4.0})
    assert implied(a_plan(step, workers=2)).made == pytest.approx({0: 1.0, 1: 2.0, 2: 4.0})


def test_the_rows_of_a_prompt_are_there_when_its_last_response_is() -> None:
    assert implied(a_plan(a_step(0, [10, 30, 5, 5], samples=2), slots=2)).made == pytest.approx(
        {0: 3.0, 1: 3.0, 2: 2.0, 3: 2.0}
    )


def test_a_synchronous_step_begins_when_the_one_before_is_trained() -> None:
    plan = a_plan(a_step(0, [10]), a_step(1, [10]))
    times = implied(plan)
    assert times.trained == pytest.approx([1.6, 3.2])
    assert times.stages(plan)[1] == pytest.approx(
        {"rollout": 1.0, "reward": 0.0, "reference": 0.2, "train": 0.4, "step": 1.6}
    )


def test_an_asynchronous_step_begins_so_many_updates_before() -> None:
    steps = [a_step(number, [10]) for number in range(3)]
    assert implied(a_plan(*steps, max_lag=1)).made == pytest.approx({0: 1.0, 1: 2.0, 2: 3.0})
    slow = replace(PACE, train_token_s=1.0)  # 20 seconds an update
    assert implied(a_plan(*steps, max_lag=1, pace=slow)).made == pytest.approx({0: 1.0, 1: 2.0, 2: 1.2 + 20 + 1})


def test_rows_that_are_too_old_expire_and_the_rest_is_trained() -> None:
    """The second response of the first step takes as long as the three steps after it."""
    steps = [a_step(0, [10, 200]), *(a_step(number, [10, 10]) for number in range(1, 6))]
    plan = a_plan(*steps, max_lag=1, slots=2)
    times = implied(plan)
    assert times.expired == 1
    assert sum(len(rows) for rows in times.taken) == plan.rows - 1
    assert all(1 not in rows for rows in times.taken)


def test_every_row_of_a_task_is_made_and_trained() -> None:
    plan = Plan(generate("search_7b", prompts=16, samples=4, steps=3), workers=3, slots=5, max_lag=2)
    times = implied(plan)
    assert sorted(times.made) == sorted(times.rewarded) == sorted(times.referenced) == list(range(plan.rows))
    rows = [row for taken in times.taken for row in taken]
    assert len(set(rows)) == len(rows) == plan.rows - times.expired


# What it will not do


def test_what_does_not_fit_is_said_with_the_scale_that_does() -> None:
    plan = Plan(generate("video_understanding_7b", prompts=32, samples=4, steps=1))
    said = why_not(plan, 512 << 20, 0)
    assert "GiB are read and written at once" in said
    scale = float(said.split("--payload-scale ")[1].split()[0])
    assert why_not(replace(plan, payload_scale=scale), 512 << 20, 0) == ""
    assert why_not(replace(plan, payload_scale=1.3 * scale), 512 << 20, 0)


def test_a_command_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert replay.main(["no_such_task"]) == 2
    assert "none of the tasks" in capsys.readouterr().err
    assert replay.main(["video", "--prompts", "64", "--payload-scale", "1", "--memory", "256MiB", "--spill", "0"]) == 2
    assert "--payload-scale" in capsys.readouterr().err
    file = tmp_path / "trace.json"
    write(generate("math_dapo_32b", prompts=2, steps=1), file)
    assert replay.main([str(file), "--prompts", "2"]) == 2


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


def small(max_lag: int) -> Plan:
    """Some seconds of a job with pixels, tools' and rewards' seconds, in a few tenths."""
    made = generate("image_understanding", prompts=4, samples=4, steps=3, seed=1)
    steps = [replace(step, reward_seconds=np.full(16, 0.5), tool_seconds=np.full(16, 0.2)) for step in made.steps]
    pace = Pace(token_s=0.01, speed=5)
    ranks = {"reference": Ranks(1, 2), "trainer": Ranks(2, 1)}
    trace = Trace(made.name, made.modality, made.source, tuple(steps))
    return Plan(trace, pace, workers=1, slots=8, max_lag=max_lag, payload_scale=0.05, **ranks)


def config(directory: Path) -> dp.NodeConfig:
    return dp.NodeConfig(memory="64MiB", spill="256MiB", spill_dir=directory, prewarm=0)


@pytest.mark.long
@each_case("max_lag", [0, 1])
def test_a_replay_gives_each_row_once_to_each_task(max_lag: int, tmp_path: Path) -> None:
    """All bytes are compared where they are read: a process that found others would have ended the run."""
    plan = small(max_lag)
    found = run(plan, config(tmp_path), 60)
    check(plan, found)
    assert found.seen["reference 0.0"] == found.seen["reference 0.1"]
    assert len(found.times.trained) == 3 or found.times.expired
    times, expected = found.times, implied(plan)
    for row in range(plan.rows):
        assert times.made[row] > plan.made_s[row] - 0.05  # it is told once the append is over: a reward may be before
        assert times.rewarded[row] > plan.made_s[row] + plan.reward_s[row] - 0.05
    assert times.trained[-1] > 0.9 * expected.trained[-1] or found.times.expired
    if not max_lag:
        assert found.lags == [0, 0, 0]
        firsts = [min(times.made[row] for row in range(*plan.starts[step : step + 2])) for step in (1, 2)]
        assert firsts[0] > times.trained[0]
        assert firsts[1] > times.trained[1]
    assert found.memory.total < 1.1 * (64 << 20) + (plan.processes + 1) * (150 << 20)
    assert {row.unit for row in report.rows(plan, expected, [found], 64 << 20)} == {"%", "MiB"}


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


def test_a_process_that_is_killed_ends_the_replay(tmp_path: Path) -> None:
    plan = replace(small(0), pace=Pace(token_s=10.0))
    before = set(psutil.Process().children(recursive=True))
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.05):
            for child in set(psutil.Process().children(recursive=True)) - before:
                if "spawn_main" in " ".join(child.cmdline()):
                    child.kill()
                    return

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(Broken, match=r"exit code -9|failed"):
            run(plan, config(tmp_path), 60)
    finally:
        over.set()
        killer.join()
