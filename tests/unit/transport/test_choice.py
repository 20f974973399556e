"""Which transports a node has, and which of them reads from whom."""

from __future__ import annotations

import logging

import pytest

from dataplane.transport import choice
from dataplane.transport.base import TransportError
from dataplane.transport.channels import Transport
from dataplane.transport.choice import TransportChoice, started
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
def chosen(clock: Clock) -> TransportChoice:
    return TransportChoice([FIRST, SECOND], clock)


def fail(chosen: TransportChoice, node: bytes, transport: Transport, times: int = 1) -> None:
    for _ in range(times):
        chosen.failed(node, transport, TransportError("no"))


def test_a_failing_transport_is_tried_last_for_its_node_for_a_while(chosen: TransportChoice, clock: Clock) -> None:
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


async def test_a_named_transport_that_does_not_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves none of the others listening: `no_leaks` sees to that."""
    monkeypatch.setattr(choice, "MAKERS", {"tcp": Tcp, "ucx": lambda host, told: Missing("ucx")})
    with pytest.raises(OSError, match="not installed"):
        await started(["tcp", "ucx"], "127.0.0.1")


async def test_an_automatic_transport_that_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choice, "MAKERS", {"tcp": Tcp, "ucx": lambda host, told: Missing("ucx")})
    monkeypatch.setattr(choice, "automatic", lambda: ["ucx", "tcp"])
    with caplog.at_level(logging.WARNING):
        (only,) = await started([], "127.0.0.1")
    assert only.name == "tcp"
    assert caplog.messages == ["transport ucx is not available: its library is not installed"]
    await only.aclose()
