"""Weights by version, end to end: published by one and by several, mapped in place, kept, watched, over hosts."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dataplane as dp
from dataplane.client import publishing
from dataplane.weights import Slice
from tests.etcd import needs_etcd
from tests.integration.test_hosts import connected
from tests.processes import MIB, StandingNode, Worker, eventually
from tests.torches import torches

torch = pytest.importorskip("torch")


@pytest.fixture
def plane(node: StandingNode) -> Any:
    with dp.connect(node.address) as plane:
        yield plane


def same(one: Any, other: Any) -> bool:
    """Bit for bit."""
    flat = [each.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*flat)


def every_kind() -> dict[str, Any]:
    shared = torch.randn(100, 64, dtype=torch.bfloat16)
    tensors = {
        "embed": shared,
        "head": shared,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "strided": torch.randn(6, 8).t(),
        "every other": torch.arange(20)[::2],
        "flags": torch.tensor([True, False, True]),
        "complex": torch.randn(4, dtype=torch.complex64),
        "conjugate": torch.randn(4, dtype=torch.complex128).conj(),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "nan": torch.tensor([0x7FC1, 0x7FFF], dtype=torch.int16).view(torch.bfloat16),
    }
    floats = [name for name in dir(torch) if name.startswith("float8_") and name != "float8_"]
    return tensors | {
        name: torch.randint(0, 255, (7, 3), dtype=torch.uint8).view(getattr(torch, name)) for name in floats
    }


def test_every_kind_of_tensor_round_trips_bit_for_bit(plane: Any) -> None:
    weights, tensors = plane.weights("actor"), every_kind()
    weights.publish(1, tensors)
    found = weights.get()
    assert (found.version, list(found)) == (1, list(tensors))
    assert all(same(found[name], tensors[name]) for name in tensors)
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    assert not found.numpy("embed").flags.writeable
    assert found.numpy("embed").dtype == np.uint16
    found["embed"].zero_()  # a private copy of the page: nobody else sees it
    assert same(weights.get()["embed"], tensors["embed"])
    weights.publish(2, {"w": np.arange(3, dtype=">i4")})
    assert weights.get()["w"].tolist() == [0, 1, 2]
    del found
    weights.drop()
    assert plane.stats().shards == 0


def test_old_versions_are_freed_without_affecting_their_readers(plane: Any) -> None:
    weights = plane.weights("actor", keep=2)
    weights.publish(1, {"w": torch.full((1000, 100), 1.0)})
    first = weights.get()
    for version in (2, 3, 4):
        weights.publish(version, iter([("w", torch.full((1000, 100), float(version)))]))
    assert weights.versions() == [3, 4]
    assert (first.version, first["w"].mean().item()) == (1, 1.0)
    assert weights.get(">= 3").version == 4
    assert weights.get(3)["w"][0, 0] == 3
    with pytest.raises(dp.Freed):
        weights.get(2)
    with pytest.raises(dp.NotReady):
        weights.get(5, timeout=0)
    with pytest.raises(dp.NotReady):
        weights.get(">= 5", timeout=0.01)
    with pytest.raises(dp.Misuse, match="not newer"):
        weights.publish(4, {"w": torch.zeros(1)})


@pytest.mark.parametrize("step", ["_announce", "_tidy"])
def test_a_publish_succeeds_when_announcing_or_tidying_fails(
    plane: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def unanswered(*_: object) -> None:
        raise dp.PeerUnavailable("no leader")

    weights = plane.weights("actor")
    with monkeypatch.context() as patched:
        patched.setattr(weights._inner, step, unanswered)
        weights.publish(1, {"w": torch.ones(2)})
    weights.publish(2, {"w": torch.ones(2)})
    assert weights.versions() == [1, 2]


def test_watchers_and_readers_wait_for_new_versions(plane: Any, node: StandingNode) -> None:
    told: list[int] = []
    got: list[int] = []

    def watch() -> None:
        with dp.connect(node.address) as other:
            for version in other.weights("actor").watch():
                told.append(version)
                if version == 3:
                    return

    def read() -> None:
        with dp.connect(node.address) as other:
            got.append(other.weights("actor").get(">= 2").version)

    threads = [threading.Thread(target=watch), threading.Thread(target=read)]
    for thread in threads:
        thread.start()
    weights = plane.weights("actor")
    for version in (1, 2, 3):
        weights.publish(version, {"w": torch.ones(3)})
    for thread in threads:
        thread.join(30)
    assert told[-1] == 3
    assert told == sorted(set(told))
    assert got[0] >= 2


def test_a_version_becomes_visible_when_all_its_ranks_have_published(plane: Any) -> None:
    weights = plane.weights("actor")
    whole = torch.arange(24.0).reshape(6, 4)
    weights.publish(1, {"w": Slice(whole[:3], whole.shape, (0, 0))}, rank=0, ranks=2)
    assert weights.versions() == []
    with pytest.raises(dp.NotReady):
        weights.get(timeout=0)
    weights.publish(1, {"w": Slice(whole[3:], whole.shape, (3, 0)), "own": torch.ones(2)}, rank=1, ranks=2)
    found = weights.get()
    assert same(found["w"], whole)
    assert same(weights.get(slices={"w": (None, slice(1, 3))})["w"], whole[:, 1:3])
    part = weights.get(names=["w"], slices={"w": [(1, 3)]})
    assert list(part) == ["w"]
    assert same(part["w"], whole[1:3])
    assert same(torch.from_numpy(part.numpy("w").copy()), whole[1:3])
    with pytest.raises(dp.Misuse, match="no tensor 'other'"):
        weights.get(names=["other"])


def test_a_part_without_data_and_a_version_without_data_are_published(plane: Any) -> None:
    weights, whole = plane.weights("actor"), torch.arange(6.0).reshape(3, 2)
    weights.publish(1, {"w": whole}, rank=0, ranks=2)
    weights.publish(1, {"w": Slice(whole[3:], whole.shape, (3, 0))}, rank=1, ranks=2)
    assert same(weights.get(1)["w"], whole)
    for version in (2, 3):
        weights.publish(version, {"w": whole[:0], "other": np.zeros((4, 0), np.float32)})
        found = weights.get(version)
        assert same(found["w"], whole[:0])
        assert found.shapes == {"w": (0, 2), "other": (4, 0)}
    with pytest.raises(dp.Misuse, match="no tensor"):
        weights.publish(4, {})


def updated(tensors: dict[str, Any], share: float, seed: int) -> dict[str, Any]:
    """As an optimizer leaves bfloat16: so many of the elements differ, everywhere."""
    made = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in tensors.items():
        bits = tensor.clone().view(torch.int16)
        bits[torch.rand(tensor.shape, generator=made) < share] ^= 1
        found[name] = bits.view(tensor.dtype)
    return found


def fetched(plane: Any, call: Any) -> tuple[Any, int]:
    before = plane.stats().fetched_bytes
    found = call()
    return found, plane.stats().fetched_bytes - before


def test_a_host_with_an_older_version_fetches_only_deltas(tmp_path: Path) -> None:
    with connected(tmp_path, memory="128MiB") as (_, two):
        here, there = (plane.weights("actor", keep=3) for plane in two)
        tensors = {f"w{i}": torch.randn(2 * MIB).to(torch.bfloat16) for i in range(5)}
        here.publish(1, tensors)
        old = there.get()
        nbytes = old.nbytes
        second = updated(tensors, 0.02, 1)
        here.publish(2, second)
        found, came = fetched(two[1], there.get)
        assert found.version == 2
        assert all(same(found[name], second[name]) for name in tensors)
        assert 0.02 * nbytes < came < 0.035 * nbytes
        third = updated(second, 0.01, 2)
        here.publish(3, third)
        fourth = third | {"w3": torch.randn(2 * MIB).to(torch.bfloat16)}
        here.publish(4, fourth)  # that version 3 was not seen, is one step more; a tensor that is new is a chunk
        found, came = fetched(two[1], there.get)
        assert all(same(found[name], fourth[name]) for name in tensors)
        assert came < 0.02 * nbytes + fourth["w3"].nbytes * 4.5
        assert all(same(old[name], tensors[name]) for name in tensors)


@needs_etcd
def test_replicated_versions_survive_the_death_of_the_publishing_host(tmp_path: Path) -> None:
    with connected(tmp_path, 3) as ((one, _, _), (a, b, c)):
        tensors = {"w": torch.randn(MIB)}
        a.weights("actor", replicas=2).publish(1, tensors)
        a.weights("other").publish(1, tensors)
        assert same(b.weights("other").get()["w"], tensors["w"])
        one.kill()
        eventually(lambda: len(b.members()["members"]) == 2)
        assert same(c.weights("actor").get(timeout=30)["w"], tensors["w"])
        assert same(b.weights("other").get(timeout=30)["w"], tensors["w"])  # its own copy
        with pytest.raises(dp.OwnerDied):
            c.weights("other").get(timeout=30)
        c.weights("actor").publish(2, {"w": tensors["w"] + 1})
        assert b.weights("actor").get(">= 2", timeout=30).version == 2
        c.weights("actor", replicas=2).drop()
        eventually(lambda: all(each.stats().shards == each.stats().copies for each in (b, c)), "no replica is left")


class Lazy(Mapping[str, Any]):
    """Tensors that are made when they are read."""

    def __iter__(self) -> Iterator[str]:
        return iter(f"w{i}" for i in range(len(self)))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, name: str) -> Any:
        return torch.full((1 << 18,), float(name[1:]))


def test_lazily_created_tensors_are_not_treated_as_tied(plane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is reused once they are written."""
    monkeypatch.setattr(publishing, "_TOGETHER", 1 << 20)
    plane.weights("actor").publish(1, Lazy())
    found = plane.weights("actor").get()
    assert {name: float(found[name][0]) for name in Lazy()} == {f"w{i}": float(i) for i in range(8)}


# DTensors of real ranks, published as they are sharded and read in any other way.

pytest.importorskip("torch.distributed.tensor")


def _rank(pipe: Any, address: str, store: str, rank: int, ranks: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(35.0).reshape(7, 5)
    tensors = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),  # of uneven shards
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "few": distribute_tensor(whole[:1], mesh, [Shard(0)]),  # of which some ranks have nothing
        "same": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": whole,
    }
    with dp.connect(address) as plane:
        plane.weights("actor").publish(1, tensors, rank=rank, ranks=ranks, timeout=60)
        plane.weights("actor").publish(2, {"same": tensors["same"]}, rank=rank, ranks=ranks, timeout=60)
        partial = dict(tensors, rows=DTensor.from_local(whole, mesh, [Partial()]))
        with pytest.raises(dp.SchemaMismatch, match="partial"):
            plane.weights("actor").publish(3, partial, rank=rank, ranks=ranks)
    pipe.send("done")
    dist.destroy_process_group()


def test_dtensors_are_published_by_their_ranks_and_read_as_one(
    node: StandingNode, tmp_path: Path, with_torch: None
) -> None:
    ranks, store = 3, str(tmp_path / "store")
    with ExitStack() as undo:
        workers = [
            undo.enter_context(Worker(_rank, node.address, store, rank, ranks, context=torches))
            for rank in range(ranks)
        ]
        assert [worker.hear() for worker in workers] == ["done"] * ranks
    whole = torch.arange(35.0).reshape(7, 5)
    with dp.connect(node.address) as plane:
        found = plane.weights("actor").get(1)
        assert all(torch.equal(found[name], whole) for name in ("rows", "columns", "same", "plain"))
        assert torch.equal(found["few"], whole[:1])
        assert torch.equal(plane.weights("actor").get(2)["same"], whole), "of which the other ranks published nothing"
        part = plane.weights("actor").get(1, names=["columns"], slices={"columns": (slice(2, 6), slice(1, 4))})
        assert torch.equal(part["columns"], whole[2:6, 1:4])
        assert plane.weights("actor").versions() == [1, 2]


def test_a_late_publication_does_not_change_a_complete_version(plane: Any, node: StandingNode) -> None:
    weights = plane.weights("actor")

    def late() -> Iterator[tuple[str, Any]]:
        with dp.connect(node.address) as other:
            other.weights("actor").publish(1, {"w": np.full(4, 1.0, np.float32)})
        yield "other", np.full(4, 2, np.int32)

    with pytest.raises(dp.Misuse, match="completed meanwhile by another publication"):
        weights.publish(1, late())
    found = weights.get(1)
    assert {name: found.numpy(name).tolist() for name in found} == {"w": [1.0] * 4}
    assert plane.tables()["chunks/actor"]["rows"] == 2, "nothing of the late one stays"


def test_a_part_that_is_published_again_replaces_the_earlier_one_at_once(plane: Any) -> None:
    weights = plane.weights("actor")
    for value in (1.0, 2.0):
        weights.publish(1, {"w0": np.full(4, value)}, rank=0, ranks=2)
        assert plane.tables()["chunks/actor"]["rows"] == 2, "the chunk and the layout of one part"
    weights.publish(1, {"w1": np.zeros(4)}, rank=1, ranks=2)
    assert weights.get(1).numpy("w0").tolist() == [2.0] * 4
    assert plane.tables()["chunks/actor"]["rows"] == 4


def test_parts_left_by_a_job_with_other_ranks_do_not_count(plane: Any) -> None:
    weights = plane.weights("actor")
    for rank in (0, 1, 3):
        weights.publish(5, {f"w{rank}": np.zeros(4)}, rank=rank, ranks=4)
    for rank in range(2):
        weights.publish(5, {f"w{rank}": np.ones(4)}, rank=rank, ranks=2)
    tensors = weights.get(5, timeout=5.0)
    assert {name: tensors.numpy(name).tolist() for name in tensors} == {"w0": [1.0] * 4, "w1": [1.0] * 4}
    weights.drop()
