"""Which puts go together, and what TransferQueue is told of them then."""

from __future__ import annotations

import textwrap
import threading
from typing import Any, cast

import pytest
import torch
from tensordict import NonTensorStack, TensorDict
from transfer_queue.metadata import extract_field_schema

from dataplane.errors import Backpressure, Closed, OutcomeUnknown, PeerUnavailable, Rejected
from dataplane.integrations.verl import commits, entries
from tests.integrations.nursery import Nursery


def put(row: int, partition: str = "p", **fields: Any) -> commits.PendingPut:
    held = {name: v[None] if isinstance(v, torch.Tensor) else NonTensorStack(v) for name, v in fields.items()}
    data = TensorDict(held, batch_size=[1])
    columns, how = entries.columns_of(data)
    return commits.PendingPut(partition, [row], columns, how, extract_field_schema(data))


@pytest.mark.parametrize("size", [2, commits._SMALL])
def test_puts_of_one_row_stay_in_their_order(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Also where the first waits for room, and is small or large; others pass it."""
    room = threading.Event()
    stored: list[tuple[int, float]] = []

    def store(self: commits.Committer, puts: Any, timeout: float) -> None:
        for each in puts:
            first = each.rows[0] == 0 and each.columns["x"][0][0] == 0
            if first and not timeout:
                raise Backpressure("there is no room", waited_s=0.0)
            if first:
                assert room.wait(30)
        stored.extend((each.rows[0], float(each.columns["x"][0][0])) for each in puts)

    monkeypatch.setattr(commits.Committer, "_store", store)
    committer = commits.Committer(cast(Any, None), timeout=30)
    try:
        of_one = [put(0, x=torch.full((size if not value else 2,), float(value))) for value in range(4)]
        others = [put(row, x=torch.ones(2)) for row in range(1, 4)]
        for each in [of_one[0], *others[:2], *of_one[1:], others[2]]:
            committer.submit(each)
        for each in others:
            each.done.result(20)
        assert not any(each.done.done() for each in of_one)
        room.set()
        of_one[-1].done.result(20)
        assert [value for row, value in stored if row == 0] == [0, 1, 2, 3]
    finally:
        room.set()
        committer.close()
    for pool in (committer._pool, committer._small):
        pool.shutdown()
    assert not committer._last, "what is done is forgotten"


def test_a_merged_schema_lists_different_shapes_row_by_row() -> None:
    one, other = (
        put(0, x=torch.arange(3), s=torch.tensor(1.0), t="a"),
        put(1, x=torch.arange(5), s=torch.tensor(2.0), t="b"),
    )
    schema = commits.merged_schema([(one.schema, 1), (other.schema, 1)])
    assert (schema["x"]["is_nested"], schema["x"]["per_sample_shapes"]) == (True, [(3,), (5,)])
    assert (schema["s"]["is_nested"], "per_sample_shapes" in schema["s"]) == (False, False)
    assert schema["t"]["is_non_tensor"]


def test_large_puts_that_wait_for_memory_do_not_delay_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many large puts wait, and although one that was small gave up."""
    room = threading.Event()

    def store(self: commits.Committer, puts: Any, timeout: float) -> None:
        if puts[0].columns["x"][0].nbytes > commits._SMALL:
            assert room.wait(30)

    monkeypatch.setattr(commits.Committer, "_store", store)
    committer = commits.Committer(cast(Any, None), timeout=30)
    try:
        large = [put(row, x=torch.zeros(commits._SMALL)) for row in range(8)]
        gone = put(8, x=torch.ones(2))
        assert not gone.done.cancel(), "its waiter can not end it for the others"
        small = [gone, *(put(row, x=torch.ones(2)) for row in range(9, 12))]
        for each in [*large, *small]:
            committer.submit(each)
        for each in small:
            each.done.result(20)
        assert not any(each.done.done() for each in large)
    finally:
        room.set()
        for each in large:
            each.done.result(20)
        committer.close()


@pytest.mark.parametrize("size", [2, commits._SMALL])
def test_every_put_of_a_committer_that_was_closed_fails(size: int) -> None:
    """Not the first alone, for whose end the others would wait."""
    committer = commits.Committer(cast(Any, None), timeout=30)
    committer.close()
    puts = [put(row, x=torch.ones(size)) for row in range(3)]
    for each in puts:
        committer.submit(each)
        with pytest.raises(Closed, match="was closed"):
            each.done.result(20)


class Odd:
    nbytes = None


def test_a_put_of_unknown_size_does_not_block_later_puts_of_its_row() -> None:
    committer = commits.Committer(cast(Any, None), timeout=30)
    with pytest.raises(TypeError):
        committer.submit(put(0, x=Odd()))
    committer.close()
    later = put(0, x=torch.ones(2))
    committer.submit(later)
    with pytest.raises(Closed, match="was closed"):
        later.done.result(20)


class Telling:
    """A controller that answers as it is told to: `answers` are errors, or None."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Exception | None) -> None:
        self.answers = list(answers)
        self.told: list[Any] = []
        self.made = 0
        self.freed: list[Any] = []
        monkeypatch.setattr(commits, "_made", self._make)
        monkeypatch.setattr(commits.cells, "drop", lambda made: self.freed.extend(made["x"]))

    def _make(self, puts: Any, timeout: float) -> Any:
        self.made += 1
        return {"x": [b"cell %d of %d" % (row, self.made) for row in range(len(puts))]}

    def tell(self, partition: str, rows: Any, schema: Any, index: Any, tags: Any) -> None:
        self.told.append(index)
        answer = self.answers.pop(0)
        if answer is not None:
            raise answer


def committed(telling: Telling, puts: list[commits.PendingPut]) -> list[BaseException | None]:
    committer = commits.Committer(cast(Any, telling), timeout=30)
    try:
        committer._waiting.extend(puts)
        committer._commit_small()
        return [each.done.exception(20) for each in puts]
    finally:
        committer.close()
        for pool in (committer._pool, committer._small):
            pool.shutdown()


def test_a_controller_update_without_an_answer_is_repeated_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have recorded the cells: freed or replaced, its rows would have no values."""
    telling = Telling(monkeypatch, OutcomeUnknown("silent"), None)
    assert committed(telling, [put(row, x=torch.ones(2)) for row in range(2)]) == [None, None]
    assert telling.told == [{0: {"x": b"cell 0 of 1"}, 1: {"x": b"cell 1 of 1"}}] * 2
    assert not telling.freed


@pytest.mark.parametrize("last", [OutcomeUnknown("silent"), Closed("closed"), PeerUnavailable("away")])
def test_cells_that_the_controller_may_have_recorded_are_not_freed(
    monkeypatch: pytest.MonkeyPatch, last: Exception
) -> None:
    telling = Telling(monkeypatch, OutcomeUnknown("silent"), OutcomeUnknown("silent"), last)
    errors = committed(telling, [put(row, x=torch.ones(2)) for row in range(2)])
    assert [type(error) for error in errors] == [OutcomeUnknown] * 2
    assert (telling.made, len(telling.told), telling.freed) == (1, 3, [])


def test_cells_that_the_controller_refused_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    telling = Telling(monkeypatch, Rejected("another dtype"), Rejected("another dtype"))
    (error,) = committed(telling, [put(0, x=torch.ones(2))])
    assert isinstance(error, Rejected)
    assert telling.freed == [b"cell 0 of 1", b"cell 0 of 2"]


def test_an_unanswered_controller_change_has_an_unknown_outcome(nursery: Nursery) -> None:
    code = """
        from types import SimpleNamespace
        import zmq
        from dataplane import OutcomeUnknown, PeerUnavailable
        from dataplane.integrations.verl.controller import Controller

        silent = zmq.Context.instance().socket(zmq.ROUTER)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        info = SimpleNamespace(ip="127.0.0.1", id="silent", to_addr=lambda _: f"tcp://127.0.0.1:{port}")
        asking = Controller(info, "who asks", answer_s=0.1)
        for call in (asking.partitions, lambda: asking.clear("p", [1]), lambda: asking.tell("p", [1], {}, {})):
            try:
                call()
            except (OutcomeUnknown, PeerUnavailable) as error:
                tell(type(error).__name__)
        asking.close()
    """
    with nursery.process(textwrap.dedent(code)) as running:
        assert [running.hear() for _ in range(3)] == ["PeerUnavailable", "OutcomeUnknown", "OutcomeUnknown"]
        running.wait()


def test_a_process_ends_though_the_controller_does_not_answer(nursery: Nursery) -> None:
    code = """
        import asyncio, threading
        from types import SimpleNamespace
        import zmq
        from dataplane.integrations.verl.controller import Controller

        silent = zmq.Context.instance().socket(zmq.ROUTER)
        port = silent.bind_to_random_port("tcp://127.0.0.1")
        info = SimpleNamespace(ip="127.0.0.1", id="silent", to_addr=lambda _: f"tcp://127.0.0.1:{port}")
        asked = Controller(info, "who asks").asked("GET_LIST_PARTITIONS", {}, "LIST_PARTITIONS_RESPONSE")
        threading.Thread(target=asyncio.run, args=[asked], daemon=True).start()
        silent.recv_multipart()
        tell("asked")
    """
    with nursery.process(textwrap.dedent(code)) as running:
        assert running.hear() == "asked"
        running.wait()


def test_a_connection_lost_while_idle_is_reestablished(nursery: Nursery) -> None:
    """As of a controller that was started again: nothing is sent by the old one."""
    code = """
        from concurrent.futures import ThreadPoolExecutor
        from types import SimpleNamespace
        import zmq
        from transfer_queue.utils.zmq_utils import ZMQMessage, ZMQRequestType
        from dataplane.integrations.verl.controller import Controller

        addresses = []
        controller = Controller(SimpleNamespace(ip="127.0.0.1", id="c", to_addr=lambda _: addresses[-1]), "who asks")
        for name in ("before", "after"):
            with zmq.Context() as context, context.socket(zmq.ROUTER) as server, ThreadPoolExecutor(1) as asking:
                server.rcvtimeo = 60_000
                addresses.append(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
                asked = asking.submit(controller.partitions)
                identity, *_ = server.recv_multipart()
                body = {"partition_ids": [name]}
                answer = ZMQMessage.create(ZMQRequestType.LIST_PARTITIONS_RESPONSE, "c", body)
                server.send_multipart([identity, *answer.serialize()])
                tell(asked.result(60))
            (line,) = controller._idle
            assert line._events.poll(60_000), "the connection is lost"
    """
    with nursery.process(textwrap.dedent(code)) as running:
        assert [running.hear(), running.hear()] == [["before"], ["after"]]
        running.wait()
