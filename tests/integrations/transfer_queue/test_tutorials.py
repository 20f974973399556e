"""TransferQueue's tutorials, unchanged, as its package brings them, with `dataplane` in its place by one line before;
and the code of our own page.

Each tutorial drives a Ray job, or one for each of its parts; two that need no more are run in one job, as each job has
nodes of its own. Their checks are their own; besides, what they say that they were given is compared.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from tests.integrations.marks import PLANE
from tests.integrations.nursery import Nursery

pytestmark = [pytest.mark.timeout(300), *PLANE]

DONE = "Tutorial Complete!"
GIVEN = re.compile(r"Got samples(?: \(high priority\))?: \[(.*?)\]")

RUN = """
import contextlib, io, runpy
tq.install()
import ray
shutdown, told = ray.shutdown, {{}}
for path in {paths!r}:
    sys.argv[:] = [path]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if len({paths!r}) > 1:
            ray.shutdown = lambda: None
        runpy.run_path(path, run_name="__main__")
        if path == {paths!r}[-1]:
            shutdown()  # after which all that workers said is there
    told[path] = said.getvalue()
tell(list(told.values()))
"""


@pytest.fixture(scope="module")
def run(nursery: Nursery, cluster: str) -> Callable[..., list[str]]:
    """Runs tutorials of TransferQueue's package in a process; what each, and its workers, print."""
    found = {Path(str(each)).stem: str(each.locate()) for each in importlib.metadata.files("TransferQueue") or ()}

    def result(*names: str) -> list[str]:
        environment = dict.fromkeys(("DATAPLANE_ADDRESS", "DATAPLANE_JOB", "DATAPLANE_TRANSFER_QUEUE"), "")
        code = RUN.format(paths=[found[name] for name in names])
        with nursery.process(code, RAY_ADDRESS=cluster, **environment) as process:
            said: list[str] = process.hear()
        assert all(DONE in each for each in said)
        return said

    return result


def given(said: str) -> list[list[int]]:
    """The samples that a tutorial says it got, call by call."""
    return [[int(each) for each in found.split(",")] for found in GIVEN.findall(said)]


def test_the_code_of_the_documentation_page_prints_its_listed_output(nursery: Nursery) -> None:
    page = (Path(__file__).parents[3] / "docs/transfer_queue.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    run = f"""
import contextlib, io
said = io.StringIO()
with contextlib.redirect_stdout(said):
    exec({code!r}, {{}})
tell(said.getvalue().splitlines())
"""
    with nursery.process(run, **dict.fromkeys(("DATAPLANE_ADDRESS", "DATAPLANE_JOB"), "")) as process:
        assert process.hear() == re.findall(r"  # -> (.*)$", page, re.MULTILINE)
        process.wait()


def test_the_tutorials_on_core_components_and_key_value_interface_run(run: Callable[..., list[str]]) -> None:
    core, by_key = run("01_core_components", "02_kv_interface")
    assert "Global indexes: [0, 1, 2, 3]" in core
    assert "key='1_1' | tag={'global_steps': 1, 'status': 'finish', 'model_version': 1}" in by_key
    assert "key='0_0' | tag={'global_steps': 0, 'status': 'finish', 'model_version': 0}" in by_key
    assert "retrieved only ['input_ids'] field" in by_key
    assert "Fields: ['attention_mask', 'input_ids']" in by_key, "those that all rows have"
    assert "Remaining keys in partition: ['1_1', '1_2', '2_0']" in by_key


@pytest.mark.long
def test_the_tutorial_on_metadata_runs(run: Callable[..., list[str]]) -> None:
    (said,) = run("03_metadata_concepts")
    assert "Global indexes in new BatchMeta: [0, 2, 4, 6]" in said
    assert "Chunk 1: 4 samples, indexes=[4, 5, 6, 7]" in said


@pytest.mark.long
def test_the_tutorial_on_custom_samplers_runs(run: Callable[..., list[str]]) -> None:
    (said,) = run("05_custom_sampler")
    replaced, once, by_priority = given(said)[:3], given(said)[3:6], given(said)[6:]
    assert [len(each) for each in replaced] == [2, 1, 2]
    assert sorted(chain(*once)) == list(range(6)), "each once"
    assert {*chain(*by_priority)} <= {2, 3, 7}, "all others are of a weight of 1 in 10,000"


@pytest.mark.long
def test_the_tutorial_on_the_controller_runs(run: Callable[..., list[str]]) -> None:
    (said,) = run("04_understanding_controller")
    assert given(said) == [[0, 1, 2], [3, 4, 5], [0, 1]]


@pytest.mark.long
def test_the_tutorial_on_the_streaming_loader_runs(run: Callable[..., list[str]]) -> None:
    (said,) = run("06_streaming_dataloader")
    seen: dict[str, list[str]] = {}
    ranks: dict[str, str] = {}
    for worker, rank, samples in re.findall(r"Update Worker@(\d)\]: dp_rank (\d) retrieved samples: \[(.*?)\]", said):
        seen.setdefault(worker, []).append(samples)
        ranks[worker] = rank
    assert ranks == {"0": "0", "1": "0", "2": "1", "3": "1"}
    assert all(len(samples) == 5 for samples in seen.values())
    assert sorted(seen["0"]) == sorted(seen["1"]), "members of a rank have the same samples"
    assert sorted(seen["2"]) == sorted(seen["3"])
    assert not {*seen["0"]} & {*seen["2"]}, "ranks share none"
