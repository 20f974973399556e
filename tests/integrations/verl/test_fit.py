"""verl's own trainer, from its command line, with each storage: what trainer and validation see is the same, row by
row, byte by byte. What runs is said in `fit`.

All are compared with a synchronous run with TransferQueue's own storage, one of text and one of images, of which a
digest is kept (`fit/reference.json`): where a run's is the same, it saw the same; where it is not, as with another
version of what is installed, the reference is run and compared field by field. By default the storage has a run of
images. In the long tests each has every mode, kind and number of ranks, and most pairs of
these. A run that hangs says who waits for what (`fit.hang`).
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.marks import SYSTEMS, long
from tests.integrations.verl.fit.model import make_data, make_model
from tests.integrations.verl.fit.record import Seen
from tests.integrations.verl.fit.run import Job

pytestmark = [pytest.mark.timeout(1000), *SYSTEMS]

REFERENCES = json.loads((Path(__file__).parent / "fit" / "reference.json").read_text())
SIDE = 56  # of an image, in pixels: four of its patches make a token
#: Store, kind of prompts, ranks of the trainer.
SYNCHRONOUS = [
    ("Dataplane", "images", 1),
    *long(("Dataplane", "images", 2), ("Dataplane", "text", 1), ("Dataplane", "text", 2), ("module", "text", 2)),
]
#: And the mode.
ASYNCHRONOUS = long(
    ("SimpleStorage", "images", "colocate_async", 1),
    ("SimpleStorage", "text", "separate_async", 1),
    ("Dataplane", "images", "colocate_async", 2),
    ("Dataplane", "text", "separate_async", 1),
    ("Dataplane", "images", "separate_async", 1),
    ("module", "text", "colocate_async", 2),
)
#: With images, verl takes the rows of a rank that are all equally long for ones that differ in another dimension
#: (`maybe_fix_3d_position_ids`), whatever gave them; in `separate_async` two ranks have two rows each, which are so
#: after a resume.
RESUMED = long(
    ("SimpleStorage", "images", "separate_async", 1),
    ("Dataplane", "images", "separate_async", 1),
    ("Dataplane", "text", "colocate_async", 2),
    ("Dataplane", "images", "colocate_async", 1),
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


def check_metrics(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [line.keys() for line in found] == [line.keys() for line in expected]
    assert all(line == pytest.approx(other, rel=1e-5, abs=1e-6) for line, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("store", "kind", "ranks"), SYNCHRONOUS)
def test_a_synchronous_run_sees_the_same_rows_as_with_simple_storage(
    runs: Runs, store: str, kind: str, ranks: int
) -> None:
    job, known = runs(store, kind, ranks=ranks), REFERENCES[kind]
    seen, expected = Seen(job.record), known["metrics"]
    if seen.digest() != known["digest"]:
        other = runs("SimpleStorage", kind)
        reference, expected = Seen(other.record), metrics(other)
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
    check_metrics(metrics(job), expected)


@pytest.mark.long
@pytest.mark.parametrize("kind", REFERENCES)
def test_the_reference_digest_agrees_with_a_run_with_simple_storage(runs: Runs, kind: str) -> None:
    job = runs("SimpleStorage", kind)
    found = {"digest": Seen(job.record).digest(), "metrics": metrics(job)}
    told = json.dumps(found)  # what to keep
    assert found["digest"] == REFERENCES[kind]["digest"], told
    check_metrics(metrics(job), REFERENCES[kind]["metrics"])


@pytest.mark.parametrize(("store", "kind", "mode", "ranks"), ASYNCHRONOUS)
def test_an_asynchronous_run_trains_with_the_rows_of_a_synchronous_one(
    runs: Runs, store: str, kind: str, mode: str, ranks: int
) -> None:
    seen = Seen(runs(store, kind, mode=mode, ranks=ranks).record)
    assert seen.lasting() == Seen(runs("SimpleStorage", kind).record).lasting()
    assert max(seen.spans()) > 1, "a response was cut, and resumed with other weights"


@pytest.mark.parametrize(("store", "kind", "mode", "ranks"), RESUMED)
def test_a_resumed_run_trains_the_unfinished_rows_of_its_checkpoint(
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
