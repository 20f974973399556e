"""Which transports a node has, and which of them reads from whom."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dataplane.config import TRANSPORTS
from dataplane.transport import choice
from dataplane.transport.base import Transport, TransportError
from dataplane.transport.choice import MAKERS, Choice, automatic, has_rdma, started
from dataplane.transport.tcp import Tcp

NODE, OTHER = b"node", b"other"
BOTH = {"first": "", "second": ""}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Named(Tcp):
    def __init__(self, name: str) -> None:
        super().__init__("127.0.0.1")
        self.name = name


class Missing(Named):
    async def start(self) -> None:
        raise OSError("its library is not installed")


FIRST, SECOND = Named("first"), Named("second")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def chosen(clock: Clock) -> Choice:
    return Choice([FIRST, SECOND], clock)


def fail(chosen: Choice, node: bytes, transport: Transport, times: int = 1) -> None:
    for _ in range(times):
        chosen.failed(node, transport, TransportError("no"))


def test_every_name_of_the_settings_is_a_transport() -> None:
    assert tuple(MAKERS) == TRANSPORTS
    assert [make("127.0.0.1", "").name for make in MAKERS.values()] == list(TRANSPORTS)


def test_those_that_both_have_the_best_first(chosen: Choice) -> None:
    assert chosen.of(NODE, BOTH) == [FIRST, SECOND]
    assert chosen.of(NODE, {"third": "", "second": ""}) == [SECOND]
    assert chosen.of(NODE, {}) == []


def test_one_that_fails_is_put_last_for_that_node_and_a_while(chosen: Choice, clock: Clock) -> None:
    fail(chosen, NODE, FIRST, 2)
    assert chosen.of(NODE, BOTH) == [FIRST, SECOND]
    fail(chosen, NODE, FIRST)
    assert chosen.of(NODE, BOTH) == [SECOND, FIRST]
    assert chosen.of(OTHER, BOTH) == [FIRST, SECOND]
    assert chosen.of(NODE, {"first": ""}) == [FIRST]
    clock.now += 61
    assert chosen.of(NODE, BOTH) == [FIRST, SECOND]
    fail(chosen, NODE, FIRST)  # and at once again, where it has not worked meanwhile
    assert chosen.of(NODE, BOTH) == [SECOND, FIRST]


def test_all_that_fail_are_tried_in_their_order(chosen: Choice) -> None:
    for transport in (SECOND, FIRST):
        fail(chosen, NODE, transport, 3)
    assert chosen.of(NODE, BOTH) == [FIRST, SECOND]


def test_a_host_without_a_device_has_tcp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not has_rdma(tmp_path / "none")
    assert not has_rdma(tmp_path)
    (tmp_path / "mlx5_0").touch()
    assert has_rdma(tmp_path)
    monkeypatch.setattr(choice, "has_rdma", lambda: False)
    assert automatic() == ["tcp"]
    monkeypatch.setattr(choice, "has_rdma", lambda: True)
    assert automatic()[-1] == "tcp"


async def test_one_that_was_named_and_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves none of the others listening: `no_leaks` sees to that."""
    monkeypatch.setattr(choice, "MAKERS", {"tcp": Tcp, "ucx": lambda host, told: Missing("ucx")})
    with pytest.raises(OSError, match="not installed"):
        await started(["tcp", "ucx"], "127.0.0.1")


async def test_one_that_was_not_named_and_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "MAKERS", {"tcp": Tcp, "ucx": lambda host, told: Missing("ucx")})
    monkeypatch.setattr(choice, "automatic", lambda: ["ucx", "tcp"])
    with caplog.at_level(logging.WARNING):
        (only,) = await started([], "127.0.0.1")
    assert only.name == "tcp"
    assert caplog.messages == ["there will be no ucx: its library is not installed"]
    await only.aclose()
