"""verl's own trainer, from its command line, with each storage: what trainer and validation see is the same, row by
row, byte by byte. What runs is said in `fit`.

All are compared with a synchronous run with TransferQueue's own storage, one of text and one of images. By default each
integration has one run, of images: its rows have all fields of one of text. In the long tests each has every mode, kind
and number of ranks, and most pairs of these. A run that hangs says who waits for what (`fit.hang`).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.marks import SYSTEMS, long
from tests.integrations.verl.fit import hang
from tests.integrations.verl.fit.model import make_data, make_model
from tests.integrations.verl.fit.record import Seen
from tests.integrations.verl.fit.run import Job
from tests.integrations.verl.fit.server import Server

pytestmark = [pytest.mark.timeout(1000), *SYSTEMS]

SIDE = 56  # of an image, in pixels: four of its patches make a token
#: Store, kind of prompts, ranks of the trainer.
SYNCHRONOUS = [
    *[("Dataplane", "images", 1), ("module", "images", 1)],
    *long(("Dataplane", "images", 2), ("module", "images", 2), ("Dataplane", "text", 2), ("module", "text", 2)),
    *long(("Dataplane", "text", 1)),
]
#: And the mode.
ASYNCHRONOUS = long(
    ("SimpleStorage", "images", "colocate_async", 1),
    ("SimpleStorage", "text", "separate_async", 1),
    ("Dataplane", "images", "colocate_async", 2),
    ("Dataplane", "text", "separate_async", 1),
    ("module", "images", "separate_async", 1),
    ("module", "text", "colocate_async", 2),
)
#: With images, verl takes the rows of a rank that are all equally long for ones that differ in another dimension
#: (`maybe_fix_3d_position_ids`), whatever gave them; in `separate_async` two ranks have two rows each, which are so
#: after a resume.
RESUMED = long(
    ("SimpleStorage", "images", "separate_async", 1),
    ("Dataplane", "images", "separate_async", 1),
    ("Dataplane", "text", "colocate_async", 2),
    ("module", "images", "colocate_async", 1),
    ("module", "text", "separate_async", 2),
)
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


class Runs:
    """Runs, each made once, with the files that they share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._made: dict[Any, Job] = {}
        self._numbers = itertools.count()
        for kind, side in (("text", 0), ("images", SIDE)):
            model = directory / kind
            model.mkdir()
            make_model(model, images=bool(side))
            make_data(directory / f"{kind}.parquet", 24, image_side=side, cut_every=EVERY)
            make_data(directory / f"{kind}_validation.parquet", 2, image_side=side, first=FIRST_OF_VALIDATION)

    def job(self, store: str, kind: str, *, saved: bool = False, **named: Any) -> Job:
        """A job of three steps in a directory of its own, not run. `saved`: with a checkpoint of each step."""
        directory = self._directory / f"run_{next(self._numbers)}"
        directory.mkdir()
        data = self._directory / f"{kind}.parquet", self._directory / f"{kind}_validation.parquet"
        overrides = SEPARATE if named.get("mode") == "separate_async" else ()
        if saved:
            overrides += ("trainer.save_freq=1",)
        return Job(self._directory / kind, *data, directory, store, overrides=overrides, **{"steps": 3, **named})

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


def metrics(job: Job) -> list[dict[str, float]]:
    """verl's own, without times and memory."""
    lines = (json.loads(line) for line in (job.directory / "metrics.jsonl").read_text().splitlines())
    named = ("critic/", "response_length/", "prompt_length/", "val-", "training/global_step", "actor/entropy")
    return [{name: value for name, value in line["data"].items() if name.startswith(named)} for line in lines]


@pytest.mark.parametrize(("store", "kind", "ranks"), SYNCHRONOUS)
def test_a_synchronous_run_sees_what_one_with_simple_storage_sees(
    runs: Runs, store: str, kind: str, ranks: int
) -> None:
    """All of it: with two ranks of a trainer as with the one of the reference."""
    job, other = runs(store, kind, ranks=ranks), runs("SimpleStorage", kind)
    seen, reference = Seen(job.record), Seen(other.record)
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
    updates = {
        step: row["extra_fields"]["updates"] for (phase, step, *_), row in seen.rows.items() if phase == "update"
    }
    assert updates == {1: 0, 2: 1, 3: 2}, "each step's responses are made with the weights of the step before"
    expected = metrics(other)
    assert [line.keys() for line in metrics(job)] == [line.keys() for line in expected]
    assert all(
        line == pytest.approx(other, rel=1e-5, abs=1e-6) for line, other in zip(metrics(job), expected, strict=True)
    )


@pytest.mark.parametrize(("store", "kind", "mode", "ranks"), ASYNCHRONOUS)
def test_an_asynchronous_run_trains_with_the_rows_of_a_synchronous_one(
    runs: Runs, store: str, kind: str, mode: str, ranks: int
) -> None:
    """But for when, and with which weights: partial rollouts are resumed where they were cut."""
    seen = Seen(runs(store, kind, mode=mode, ranks=ranks).record)
    assert seen.lasting() == Seen(runs("SimpleStorage", kind).record).lasting()
    assert max(seen.spans()) > 1, "a response was cut, and resumed with other weights"


@pytest.mark.parametrize(("store", "kind", "mode", "ranks"), RESUMED)
def test_a_resumed_run_trains_what_its_checkpoint_had_in_flight(
    runs: Runs, store: str, kind: str, mode: str, ranks: int
) -> None:
    """One step, a checkpoint, and two steps more by another trainer, in a Ray of its own."""
    job = runs.job(store, kind, mode=mode, ranks=ranks, steps=1, saved=True)
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
    assert before.lasting() | seen.lasting() == Seen(runs("SimpleStorage", kind).record).lasting()


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


async def test_a_response_that_is_cut_twice_waits_for_other_weights_and_has_the_same_tokens() -> None:
    """As one in `separate_async` may be: by a server that goes to sleep, and by the weights of the next one."""
    words, cut, prompt = list(range(10, 30)), 0, [0, 5]

    async def server() -> Server:
        made = Server(words=words, eos=9, length=8, cut_token=cut)
        await made.wake_up()
        await made.set_weights(0.0, 0)
        return made

    async def asked(of: Server, tokens: list[int], seed: int, temperature: float = 1.0) -> list[int]:
        limits = {"seed": seed, "temperature": temperature, "max_tokens": 8 - len(tokens)}
        answer = await of.generate(request_id="one", prompt_ids=[*prompt, *tokens], sampling_params=limits)
        return [*tokens, *answer.token_ids]

    first, second = await server(), await server()
    seeds = [seed for seed in range(20) if len(await asked(second, [], seed, temperature=0.0)) == 4]
    assert seeds, "of four tokens: two, and two more"
    whole = await asked(second, [], seeds[0], temperature=0.0)
    for stops in (first, second):
        tokens = whole[:2] if stops is second else []
        waiting = asyncio.create_task(asked(stops, tokens, seeds[0]))
        await asyncio.sleep(0)  # it runs until it waits
        assert not waiting.done()
        await stops.abort_all_requests()
        assert await waiting == whole[:2]
    await second.set_weights(1.0, 1)
    await second.resume_generation()
    assert await asked(second, whole[:2], seeds[0]) == whole
