"""verl's own trainer, from its command line, with each storage: what trainer and validation see is the same, row by
row, byte by byte. What runs is said in `fit`.

`DATAPLANE_FIT=all` adds those of `COMBINATIONS` that take minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl: make test-integrations")

from tests.integrations.verl.fit import hang
from tests.integrations.verl.fit.model import make_data, make_model
from tests.integrations.verl.fit.record import Seen
from tests.integrations.verl.fit.run import Job

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.leaks(reason="verl's data set leaves maps behind"),
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

SIDE = 56  # of an image, in pixels: four of its patches make a token
EVERY = 4  # prompts, of which one is cut in an asynchronous run
FIRST_OF_VALIDATION = 100
SEPARATE = (
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=mail",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=fit.weights",
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
more = pytest.mark.skipif(
    os.environ.get("DATAPLANE_FIT") != "all", reason="takes a minute a run: set DATAPLANE_FIT=all"
)


class Runs:
    """Runs, each made once, with the files that they share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[Any, Job] = {}
        for kind, side in (("text", 0), ("images", SIDE)):
            model = directory / kind
            model.mkdir()
            make_model(model, images=bool(side))
            make_data(directory / f"{kind}.parquet", 24, image_side=side, cut_every=EVERY)
            make_data(directory / f"{kind}_validation.parquet", 2, image_side=side, first=FIRST_OF_VALIDATION)

    def job(self, store: str, kind: str, **named: Any) -> Job:
        """A job in a directory of its own, not run."""
        directory = self._directory / f"run_{len(self._made)}"
        directory.mkdir()
        data = self._directory / f"{kind}.parquet", self._directory / f"{kind}_validation.parquet"
        job = Job(self._directory / kind, *data, directory, store, **named)
        self._made[job] = job
        return job

    def __call__(self, store: str, kind: str, **named: Any) -> Job:
        """One that has been run."""
        known_by = (store, kind, *named.items())
        if known_by not in self._made:
            job = self.job(store, kind, **named)
            job.run()
            self._made[known_by] = job
        return self._made[known_by]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("fit"))


@pytest.fixture(scope="module")
def reference(runs: Runs) -> Seen:
    """What a run with TransferQueue's own storage sees: three steps of images."""
    return Seen(runs("SimpleStorage", "images", steps=3).record)


def metrics(job: Job) -> list[dict[str, float]]:
    """verl's own, without times and memory."""
    lines = (json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines())
    named = ("critic/", "response_length/", "prompt_length/", "val-", "training/global_step", "actor/entropy")
    return [{name: value for name, value in line["data"].items() if name.startswith(named)} for line in lines]


@pytest.mark.parametrize(("store", "ranks"), [("Dataplane", 2), ("module", 1)])
def test_images_reach_trainer_and_validation_as_with_simple_storage(
    runs: Runs, reference: Seen, store: str, ranks: int
) -> None:
    """With two ranks of a trainer as with the one of the reference."""
    job = runs(store, "images", steps=3, ranks=ranks)
    seen = Seen(job.record)
    differing = {
        (known_by, name)
        for known_by in reference.rows.keys() & seen.rows.keys()
        for name in reference.rows[known_by].keys() | seen.rows[known_by].keys()
        if reference.rows[known_by].get(name) != seen.rows[known_by].get(name)
    }
    assert not differing
    assert seen.rows == reference.rows
    assert seen.tags == reference.tags
    phases = {phase for phase, *_ in seen.rows}
    assert phases == {"actor", "reference", "update", "validation"}
    assert len(seen.rows) == 3 * (3 * 4 * 2) + 2 * 2, "steps x prompts x responses in each phase, and validation twice"
    expected = metrics(runs("SimpleStorage", "images", steps=3))
    assert [line.keys() for line in metrics(job)] == [line.keys() for line in expected]
    assert all(
        line == pytest.approx(other, rel=1e-5, abs=1e-6) for line, other in zip(metrics(job), expected, strict=True)
    )


def test_a_resumed_run_trains_what_its_checkpoint_had_in_flight(runs: Runs, reference: Seen) -> None:
    check_resumed(runs, "Dataplane", "images", Seen.lasting(reference))


def check_resumed(runs: Runs, store: str, kind: str, expected: dict[Any, Any]) -> None:
    """One step, a checkpoint, and two steps more by another trainer, in a Ray of its own."""
    job = runs.job(store, kind, mode="colocate_async", steps=1, overrides=("trainer.save_freq=1",))
    job.run()
    before = Seen(job.record)
    finished = {index for index in range(8) if index % EVERY != EVERY - 1} - before.trained()
    assert (len(before.trained()), len(finished)) == (4, 2), "of eight prompts two were cut, and four trained with"
    after = job.resumed(job.directory / "after", steps=3)
    after.run()
    seen = Seen(after.record)
    assert finished <= seen.trained(2), "what was finished comes first"
    assert not before.trained() & seen.trained(), "nothing is trained with twice"
    assert max(seen.spans()) > 1, "a response was cut, and resumed with other weights"
    assert before.lasting() | seen.lasting() == expected


COMBINATIONS = [
    (store, kind, mode)
    for mode in ("sync", "colocate_async", "separate_async")
    for kind in ("text", "images")
    for store in ("Dataplane", "module")
    if (kind, mode) != ("images", "sync")  # above
]


@more
@pytest.mark.parametrize(("store", "kind", "mode"), COMBINATIONS)
def test_rows_are_those_of_simple_storage(runs: Runs, store: str, kind: str, mode: str) -> None:
    named: dict[str, Any] = {"mode": mode, "steps": 3}
    if mode == "sync":
        named["follow"] = True
    if mode == "separate_async":
        named["overrides"] = SEPARATE
    theirs, ours = (Seen(runs(each, kind, **named).record) for each in ("SimpleStorage", store))
    if mode == "sync":
        assert ours.rows == theirs.rows
        assert ours.tags == theirs.tags
        return
    assert ours.lasting() == theirs.lasting()
    assert max(ours.spans()) > 1, "a response was cut, and resumed with other weights"


@more
@pytest.mark.parametrize("store", ["SimpleStorage", "module"])
def test_other_storages_resume_likewise(runs: Runs, reference: Seen, store: str) -> None:
    check_resumed(runs, store, "images", Seen.lasting(reference))


async def test_a_process_of_a_run_that_hangs_says_what_it_waits_for(tmp_path: Path) -> None:
    """So that a run whose time is over is told of by who waits for what."""
    never, there, done = asyncio.Event(), threading.Event(), threading.Event()

    async def a_task_of_ours() -> None:
        await never.wait()

    def a_thread_of_ours() -> None:
        there.set()
        done.wait()

    waiting, blocked = asyncio.create_task(a_task_of_ours()), threading.Thread(target=a_thread_of_ours)
    blocked.start()
    await asyncio.to_thread(there.wait)  # the task begins meanwhile
    await asyncio.to_thread(hang.watch(tmp_path, time.time()).join)
    said = hang.said(tmp_path)
    waiting.cancel()
    done.set()
    await asyncio.to_thread(blocked.join)
    assert said.startswith(f"{os.getpid()} ")
    assert "a_task_of_ours `await never.wait()`; awaits Future" in said
    assert "a_thread_of_ours `" in said
