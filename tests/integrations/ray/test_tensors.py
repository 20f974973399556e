"""The tensor transport `DATAPLANE`, with actors of a real Ray of two Ray nodes: tensors pass by reference, are those of
the moment of the return, and go with Ray's references or with the process that returned them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

import dataplane as dp
from dataplane.integrations import ray as door
from dataplane.integrations import ray_tensors
from tests.integrations.marks import SYSTEMS
from tests.processes import eventually

ray_tensors.register()  # before the classes that name it
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # what else is installed may have other `tests`

pytestmark = SYSTEMS

SETTINGS = dp.NodeConfig(memory="64MiB", spill=0, prewarm=0)
ANSWER_S = 90


class Connected:
    """An actor with a plane, connected before Ray's 60 s for a transfer begin: to import all of it in a new process may
    take long where others import too."""

    def connected(self) -> str:
        from dataplane.integrations import process

        return process.plane().address


class Maker(Connected):
    def __init__(self) -> None:
        self.kept = torch.arange(1 << 18, dtype=torch.float32)

    @ray.method(tensor_transport="DATAPLANE")
    def many(self) -> dict[str, Any]:
        strided = torch.arange(24).reshape(4, 6)
        return {
            "twice": [self.kept, self.kept],
            "empty": torch.zeros(0, 3),
            "number": torch.tensor(7),
            "bits": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
            "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
            "strided": strided.T[1:3],
            "grown": torch.nn.Parameter(torch.ones(2, 2)),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "mask": torch.tensor([True, False]),
            "text": "as it is",
        }

    @ray.method(tensor_transport="DATAPLANE")
    def sparse(self) -> Any:
        return torch.eye(3).to_sparse()

    @ray.method(tensor_transport="DATAPLANE")
    def pass_on(self, value: Any) -> Any:
        return value

    @ray.method(tensor_transport="DATAPLANE")
    def large(self, nbytes: int) -> Any:
        return torch.zeros(nbytes, dtype=torch.uint8)

    @ray.method(tensor_transport="DATAPLANE")
    def nothing(self) -> str:
        return "no tensors"

    def overwrite(self) -> None:
        self.kept.fill_(-1)


class Reader(Connected):
    def look(self, value: Any) -> Any:
        return value

    def sum(self, value: Any) -> tuple[float, float]:
        """The first element, and the sum, after a write that is nobody else's business."""
        tensor = value["twice"][0]
        found = float(tensor[0]), float(tensor.sum())
        tensor.zero_()
        return found

    def held(self, value: Any) -> None:
        self.value = value["twice"][1]

    def still(self) -> float:
        return float(self.value.sum())


@pytest.fixture(scope="module")
def two(driver: Any) -> list[str]:
    """A Ray job with nodes and the transport, on two Ray nodes: their names, this process's first."""
    door.up(SETTINGS)
    here = ray.get_runtime_context().get_node_id()
    return sorted((node["NodeID"] for node in ray.nodes() if node["Alive"]), key=lambda name: name != here)


def actor(kind: type, place: str, *, connected: bool = True) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    on = NodeAffinitySchedulingStrategy(place, soft=False)
    made = ray.remote(num_cpus=0, enable_tensor_transport=True, scheduling_strategy=on)(kind).remote()
    if connected:
        assert answer(made.connected.remote())
    return made


@pytest.fixture
def maker(two: list[str]) -> Iterator[Any]:
    made = actor(Maker, two[0])
    yield made
    ray.kill(made)


@pytest.fixture(params=["one host", "two hosts"])
def reader(two: list[str], request: pytest.FixtureRequest) -> Iterator[Any]:
    made = actor(Reader, two[request.param == "two hosts"])
    yield made
    ray.kill(made)


def answer(ref: Any) -> Any:
    return ray.get(ref, timeout=ANSWER_S)


def nothing_is_left(plane: Any) -> None:
    eventually(lambda: plane.stats().shards == 0, "what was returned is freed", ANSWER_S)


def test_returned_tensors_of_every_kind_arrive(maker: Any, reader: Any) -> None:
    with dp.connect("ray") as plane:
        ref = maker.many.remote()
        first = answer(reader.sum.remote(ref))
        assert first == (0.0, float(torch.arange(1 << 18, dtype=torch.float32).sum()))
        found = answer(ref)
        assert found["text"] == "as it is"
        assert found["twice"][0].data_ptr() == found["twice"][1].data_ptr(), "it is stored once"
        assert plane.stats().memory_used < 2 * found["twice"][0].nbytes
        assert found["empty"].shape == (0, 3)
        assert (found["number"].shape, int(found["number"])) == ((), 7)
        assert found["bits"].tolist() == [1.5, -2.0]
        assert found["bits"].dtype == torch.bfloat16
        assert found["float8"].float().tolist() == [1.5, -2.0]
        assert found["float8"].dtype == torch.float8_e4m3fn
        assert found["strided"].tolist() == torch.arange(24).reshape(4, 6).T[1:3].tolist()
        assert found["grown"].tolist() == [[1, 1], [1, 1]]
        assert found["grown"].requires_grad
        assert found["conjugate"].tolist() == [1 - 2j]
        assert found["mask"].tolist() == [True, False]
        answer(maker.overwrite.remote())
        assert answer(reader.sum.remote(ref)) == first, "the tensors are those of the return, and readers write alone"
        answer(reader.held.remote(ref))
        del ref, found
        nothing_is_left(plane)
        assert answer(reader.still.remote()) == first[1], "a reader keeps what it holds"


def test_an_actor_returns_tensors_that_it_received(maker: Any, two: list[str]) -> None:
    other = actor(Maker, two[0])
    with dp.connect("ray") as plane:
        ref = other.pass_on.remote(maker.many.remote())
        assert answer(ref)["bits"].tolist() == [1.5, -2.0]
        del ref
        nothing_is_left(plane)
    ray.kill(other)


def test_tensors_put_by_ray_put_arrive(maker: Any, reader: Any) -> None:
    with dp.connect("ray") as plane:
        ref = ray.put([torch.arange(5)], _tensor_transport="DATAPLANE")
        assert answer(reader.look.remote(ref))[0].tolist() == [0, 1, 2, 3, 4]
        del ref
        nothing_is_left(plane)


def test_tensors_are_received_into_given_buffers(maker: Any) -> None:
    from ray.experimental import set_target_for_ref

    ref = maker.large.remote(1000)
    buffer = torch.ones(1000, dtype=torch.uint8)
    set_target_for_ref(ref, [buffer])
    assert answer(ref).data_ptr() == buffer.data_ptr()
    assert not buffer.any()


def test_tensors_of_a_killed_producer_are_freed_and_lost(maker: Any, two: list[str]) -> None:
    killed = actor(Maker, two[0])
    with dp.connect("ray") as plane:
        ref = killed.many.remote()
        assert answer(ref)["number"] == 7
        assert plane.stats().shards
        ray.kill(killed)
        nothing_is_left(plane)
        with pytest.raises(dp.Lost):
            answer(ref)
        assert answer(maker.many.remote())["number"] == 7, "others are as they were"


def test_refused_tensors_raise_typed_errors_and_end_no_actor(maker: Any, reader: Any) -> None:
    with pytest.raises(dp.SchemaMismatch, match="to_dense"):
        answer(reader.look.remote(maker.sparse.remote()))
    with pytest.raises(dp.LimitExceeded, match="memory budget"):
        answer(maker.large.remote(128 << 20))
    assert answer(reader.look.remote(maker.nothing.remote())) == "no tensors"


def test_the_tensor_transport_is_registered_once(two: list[str]) -> None:
    ray_tensors.register()
    from ray.experimental.rdt.util import get_tensor_transport_manager

    transport = get_tensor_transport_manager("DATAPLANE")
    assert isinstance(transport, ray_tensors.PlaneTransport)
    assert transport.tensor_transport_backend() == "DATAPLANE"
    first = transport.extract_tensor_transport_metadata("an object", [torch.arange(3)])
    assert transport.extract_tensor_transport_metadata("an object", [torch.arange(3)]) is first, "a task done again"
    transport.garbage_collect("an object", first, [])
    transport.garbage_collect("an object", first, [])
    with pytest.raises(dp.Freed):
        transport.recv_multiple_tensors("an object", first, None)
    with pytest.raises(NotImplementedError, match="one-sided"):
        transport.send_multiple_tensors([], first, None)


def test_tensors_without_running_nodes_raise_peer_unavailable_with_a_remedy(two: list[str]) -> None:
    door.down()
    made = actor(Maker, two[0], connected=False)
    with pytest.raises(dp.PeerUnavailable, match=r"ray\.up\(\)"):
        answer(made.many.remote())
    assert answer(made.overwrite.remote()) is None, "the actor goes on"
    door.up(SETTINGS)
    assert answer(made.many.remote())["number"] == 7
    ray.kill(made)
