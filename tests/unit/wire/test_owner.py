"""Whose the other end of a connection within this host is, by the kernel, and by its tables where it does not say."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dataplane.wire import owner as module
from dataplane.wire.owner import Address, owner
from tests.cases import each_case
from tests.processes import has_ipv6
from tests.users import OTHER, OtherUser, needs_root

FAMILIES = {"IPv4": (socket.AF_INET, "127.0.0.1")} | ({"IPv6": (socket.AF_INET6, "::1")} if has_ipv6() else {})

CONNECT = """
c = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET); c.connect((sys.argv[1], int(sys.argv[2])))
print("connected", flush=True); input()
"""

LISTEN = """
l = socket.create_server(("127.0.0.1", 0)); print(l.getsockname()[1], flush=True)
input(); c, _ = l.accept(); print("accepted", flush=True); input()
"""


@pytest.fixture(params=["asked", "listed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """By which of the two ways it is found."""
    if request.param == "listed":
        monkeypatch.setattr(module, "_diagnosed", lambda local, remote: None)
        return
    with pair("127.0.0.1") as (ours, theirs):
        if module._diagnosed(ours.getsockname(), theirs.getsockname()) is None:
            pytest.skip("the kernel does not diagnose sockets here")

    def none(local: Address, remote: Address, tables: Path) -> None:
        return None

    monkeypatch.setattr(module, "_listed", none)


@contextmanager
def pair(host: str, family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection."""
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        with socket.socket(family) as ours:
            ours.connect(listener.getsockname())
            theirs, _ = listener.accept()
            with theirs:
                yield ours, theirs


@each_case("family", FAMILIES)
def test_both_ends_know_each_other(way: None, family: str) -> None:
    kind, host = FAMILIES[family]
    with pair(host, kind) as (ours, theirs):
        assert owner(ours) == owner(theirs) == os.getuid()


def test_an_address_of_ipv4_in_a_socket_of_ipv6(way: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_INET6) as ours:
        ours.connect(("::ffff:127.0.0.1", listener.getsockname()[1]))
        theirs, _ = listener.accept()
        with theirs:
            assert owner(ours) == owner(theirs) == os.getuid()


def test_who_has_not_accepted_yet_is_nobody(way: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        assert owner(ours) is None
        theirs, _ = listener.accept()
        with theirs:
            assert owner(ours) == os.getuid()


@needs_root
@each_case("family", FAMILIES)
def test_another_user_connects(way: None, family: str) -> None:
    kind, host = FAMILIES[family]
    with socket.socket(kind) as listener:
        listener.bind((host, 0))
        listener.listen()
        with OtherUser(CONNECT, host, listener.getsockname()[1]) as other:
            assert other.hear() == "connected"
            theirs, _ = listener.accept()
            with theirs:
                assert owner(theirs) == OTHER


@needs_root
def test_another_user_listens(way: None) -> None:
    with OtherUser(LISTEN) as other, socket.create_connection(("127.0.0.1", int(other.hear()))) as ours:
        assert owner(ours) != os.getuid()
        other.say("")
        assert other.hear() == "accepted"
        assert owner(ours) == OTHER


def test_where_neither_is_to_be_had_nobody_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    diagnosed: Callable[[Address, Address], None] = lambda local, remote: None  # noqa: E731
    monkeypatch.setattr(module, "_diagnosed", diagnosed)
    monkeypatch.setattr(module, "_TABLES", tmp_path)
    with pair("127.0.0.1") as (ours, _):
        assert owner(ours) is None
