"""`DataplaneStorageEngine` by itself: what is put comes back, views read their share, and what is dropped is freed."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
from verl.experimental.neoproto import DataProto, InMemoryStorageEngine

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.verl import neo, plugin

TOKENS = torch.arange(48).reshape(4, 12)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own of nested tensors


def same(left: Any, right: Any) -> bool:
    if isinstance(right, torch.Tensor) and right.is_nested:
        return all(same(a, b) for a, b in zip(left.unbind(), right.unbind(), strict=True))
    if isinstance(right, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(right, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and all(map(same, left.flat, right.flat))
    if isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in right)
    return type(left) is type(right) and left == right


def objects(*values: Any) -> Any:
    array = np.empty(len(values), object)
    array[:] = values
    return array


VALUES = {
    "tokens": TOKENS,
    "bits": torch.tensor([[1.5], [-2.0]], dtype=torch.bfloat16),
    "no rows": torch.zeros(0, 3),
    "one number": torch.tensor(3),
    "jagged": torch.nested.as_nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged),
    "strided": TOKENS.T,
    "array": np.arange(6, dtype=np.int16).reshape(3, 2),
    "text array": np.array(["a", "longer"]),
    "texts": objects("a", "b", None),
    "dicts": objects({"ground_truth": "42"}, {"ground_truth": 7, "pixels": torch.ones(2)}),
    "text": "a text",
    "list": [1, "two", None],
    "dict": {"a": 1},
    "nothing": None,
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_every_kind_round_trip(engine: Any, name: str) -> None:
    ref = engine.put(VALUES[name], key_hint="field")
    assert ref.backend == "dataplane"
    assert same(engine.get(ref), VALUES[name])
    assert same(engine.get(pickle.loads(pickle.dumps(ref))), VALUES[name])


VIEWS = {
    "rows": lambda ref: ref.with_slice((slice(1, 3),)),
    "every second": lambda ref: ref.with_slice((slice(0, 4, 2),)),
    "a sample": lambda ref: ref.with_sample(2),
    "chosen": lambda ref: type(ref)(ref.backend, ref.uid, ref.dataptr, ref.dtype, None, ([3, 0, 3],)),
    "tokens": lambda ref: ref.slice(2, 7),
    "tokens of rows": lambda ref: ref.with_slice((slice(1, 3),)).with_token_slice(2, 7),
    "rows of rows": lambda ref: ref.with_slice((slice(1, 4),)).with_slice((slice(1, 3),)),
    "cast and padded": lambda ref: ref.copy().to(dtype=torch.float32).pad([0, 2], -1.0),
    "one more dimension": lambda ref: ref.with_slice((slice(0, 2),)).unsqueeze(0),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_agree_with_the_in_memory_engine_of_verl(engine: Any, view: str) -> None:
    own = InMemoryStorageEngine()
    ours, theirs = VIEWS[view](engine.put(TOKENS)), VIEWS[view](own.put(TOKENS))
    assert same(engine.get(ours), own.get(theirs))
    assert same(engine.get_many([ours])[0], own.get(theirs))
    assert same(engine.get_many([ours], apply_ops=False)[0], TOKENS)
    if view not in ("a sample", "one more dimension"):
        rows = np.array([1, 0, 1])
        assert same(engine.get_rows(ours, rows), own.get(theirs)[rows])


def test_only_rows_selected_by_a_view_are_read(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    load = neo.load
    monkeypatch.setattr(
        neo, "load", lambda plane, columns, **how: read.append(columns.rows) or load(plane, columns, **how)
    )
    ref = engine.put(torch.arange(1000).reshape(100, 10))
    engine.get_rows(ref, np.arange(5))
    engine.get(ref.with_slice((slice(10, 20),)))
    data = DataProto.from_dict(tensors={"a": torch.ones(100, 3), "b": torch.zeros(100)}, storage=engine)
    assert data.select_idxs([7, 3]).materialize(["a", "b"])["a"].shape == (2, 3)
    assert read == [5, 10, 2], "and both columns at once"


def test_samples_are_one_put_and_one_read(engine: Any, plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = DataProto.from_dict(tensors={"tokens": TOKENS}, granularity="sample", storage=engine)
    assert plane.stats().shards == 1
    read: list[int] = []
    load = neo.load
    monkeypatch.setattr(
        neo, "load", lambda plane, columns, **how: read.append(columns.rows) or load(plane, columns, **how)
    )
    assert same(data.select_idxs([2, 0]).batch["tokens"], TOKENS[[2, 0]])
    assert read == [2]


def test_rows_of_several_become_one_value(engine: Any) -> None:
    ref = engine.consolidate(engine, [engine.put(TOKENS[:2]), engine.put(TOKENS[2:])])
    assert same(engine.get(ref), TOKENS)


def left(plane: Any) -> int:
    gc.collect()
    assert process.settle()
    return int(plane.stats().shards)


def test_a_value_is_freed_with_its_last_handle(engine: Any, plane: Any) -> None:
    ref = engine.put(TOKENS)
    other = pickle.loads(pickle.dumps(ref))
    assert other.dataptr is ref.dataptr, "a process has one handle of a value"
    del ref
    assert left(plane) == 1
    assert same(engine.get(other), TOKENS)
    del other
    assert left(plane) == 0


def test_a_value_is_freed_after_as_many_releases_as_references(engine: Any, plane: Any) -> None:
    ref = engine.put(TOKENS)
    engine.add_ref_counts([ref])
    engine.release(ref)
    assert same(engine.get(ref), TOKENS)
    engine.release([ref])
    assert plane.stats().shards == 0
    with pytest.raises(dp.Freed):
        engine.get(ref)
    engine.release(ref)


def test_columns_that_are_replaced_are_freed(engine: Any, plane: Any) -> None:
    data = DataProto.from_dict(tensors={"tokens": TOKENS}, storage=engine)
    data.batch["tokens"] = TOKENS + 1
    data.clear_cache()
    assert same(data.batch["tokens"], TOKENS + 1)
    del data
    assert left(plane) == 0


WORKER = """
    import base64, gc, pickle, sys, torch
    from verl.experimental.neoproto import DataProto
    from dataplane.integrations import process
    from dataplane.integrations.verl import neo
    given = pickle.loads(base64.b64decode(sys.argv[1]))
    engine = given._engine()
    assert type(engine) is neo.DataplaneStorageEngine, engine
    tokens = given.batch["tokens"]
    before = process.plane().stats().shards
    dropped = engine.put(torch.ones(100))
    del dropped
    made = DataProto.from_dict(tensors={"more": tokens + 1})
    print(base64.b64encode(pickle.dumps(made)).decode())
    del given, made
    gc.collect()
    assert process.settle()
    assert process.plane().stats().shards == before + 1, "what it dropped is freed, what it passed on is there"
"""


def test_a_worker_reads_borrowed_values_and_returns_its_results(engine: Any, plane: Any) -> None:
    import base64

    data = DataProto.from_dict(tensors={"tokens": TOKENS}, storage=engine)
    given = base64.b64encode(pickle.dumps(data)).decode()
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(WORKER), given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    made = pickle.loads(base64.b64decode(done.stdout.split()[-1]))
    assert same(data.batch["tokens"], TOKENS)
    data = data.union(made)
    assert same(data.batch["more"], TOKENS + 1)
    del data, made
    assert left(plane) == 0


def test_a_value_that_cannot_be_stored_is_refused_with_its_field_name(engine: Any, plane: Any) -> None:
    with pytest.raises(dp.SchemaMismatch, match="reward_model"):
        engine.put(objects({"a": threading.Lock()}), key_hint="reward_model")
    with pytest.raises(dp.SchemaMismatch, match="reward_model"):
        engine.put_many([TOKENS, threading.Lock()], key_hint="reward_model")
    assert left(plane) == 0, "all or none"


def test_a_reference_of_another_engine_is_misuse(engine: Any) -> None:
    ref = engine.put(TOKENS)
    ref.dataptr = "something else"
    with pytest.raises(dp.Misuse, match="none of the plane's"):
        engine.get(ref)
    local = engine.put({"a": 1}, backend="local")
    assert local.backend == "local"
    assert engine.get(local) == {"a": 1}
    assert engine.get_many([None, local]) == [None, {"a": 1}]


# The plugin, in verl's `neo` branch as verl loads it, and in a verl whose data planes are others.

PROGRAM = """
    import sys
    from importlib import metadata
    found = metadata.EntryPoint("dataplane", "dataplane.integrations.verl.plugin:loaded", "verl.plugins")
    others = metadata.entry_points
    metadata.entry_points = lambda **how: [found] if how == {"group": "verl.plugins"} else others(**how)
    import verl
    from verl.trainer.ppo import data_plane
    assert "verl.experimental.neoproto" not in sys.modules, "it is imported where a job asks for it"
    print(data_plane._DATA_PLANE_CLASSES["dataplane"])
"""


@pytest.mark.timeout(120)
def test_verl_loads_the_plugin_and_resolves_its_data_plane() -> None:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "auto"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["dataplane.integrations.verl.neo_plane.DataplanePPODataPlane"]


def test_a_verl_without_data_planes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__path__", [str(tmp_path)])
    assert not plugin.register_neo()


def test_an_incompatible_data_plane_registry_of_verl_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.trainer.ppo import data_plane

    monkeypatch.delattr(data_plane, "_DATA_PLANE_CLASSES")
    assert not plugin.register_neo()
    assert "trainer.data_plane=dataplane" in caplog.text
