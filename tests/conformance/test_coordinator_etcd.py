"""The coordinator that is an etcd, a real one: the suite of all coordinators, and an etcd that fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from dataplane.coordinator.base import Coordinator, OutcomeUnknown, Unavailable
from dataplane.coordinator.etcd import EtcdCoordinator
from tests.conformance.coordinators import LEASE_S, CoordinatorSuite, until
from tests.etcd import EtcdServer, needs_etcd

pytestmark = needs_etcd

SHORT_S = 0.5
_names = itertools.count()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One etcd for tests that leave it as it is, each below a name of its own."""
    with EtcdServer(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path) as server:
        yield server


@pytest.mark.leaks(reason="the etcd is the module's")
class TestEtcd(CoordinatorSuite):
    @pytest.fixture
    async def coordinator(self, shared: EtcdServer) -> AsyncIterator[Coordinator]:  # type: ignore[override]
        coordinator = EtcdCoordinator([shared.address], f"suite{next(_names)}")
        yield coordinator
        await coordinator.aclose()


@pytest.fixture
async def client(etcd: EtcdServer) -> AsyncIterator[EtcdCoordinator]:
    client = EtcdCoordinator([etcd.address], "test", timeout_s=SHORT_S)
    yield client
    await client.aclose()


async def answered(client: EtcdCoordinator) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await client.read("k")
                return
            except Unavailable:
                await asyncio.sleep(0.02)


async def test_a_stopped_etcd_is_unavailable_and_has_all_values_after_a_restart(
    etcd: EtcdServer, client: EtcdCoordinator
) -> None:
    await client.swap("k", None, b"1")
    registration = await client.register("a", b"", 30.0)
    async with aclosing(client.watch("k")) as watch, aclosing(client.watch_members()) as members:
        assert await anext(watch) == b"1"
        assert await anext(members) == {"a": b""}
        etcd.stop()
        for broken in (watch, members):
            with pytest.raises(Unavailable):
                await anext(broken)
    with pytest.raises(Unavailable):
        await client.swap("k", b"1", b"2")  # it can not have had it
    with pytest.raises(Unavailable):
        await anext(client.watch("k"))
    await asyncio.to_thread(etcd.start)
    await answered(client)
    assert await client.swap("k", b"1", b"2") == b"2"
    assert await registration.renew()


async def test_a_wiped_etcd_is_empty_and_serves_requests(etcd: EtcdServer, client: EtcdCoordinator) -> None:
    for value in range(20):  # revisions that the new one has not come to
        await client.swap("k", b"%d" % (value - 1) if value else None, b"%d" % value)
    registration = await client.register("a", b"", 30.0)
    etcd.stop()
    etcd.wipe()
    await asyncio.to_thread(etcd.start)
    await answered(client)
    assert await client.read("k") is None
    assert not await registration.renew()
    async with aclosing(client.watch("k")) as watch:
        assert await anext(watch) is None
        await client.swap("k", None, b"new")
        assert await anext(watch) == b"new"


async def test_a_swap_at_a_frozen_etcd_has_an_unknown_outcome(etcd: EtcdServer, client: EtcdCoordinator) -> None:
    """It took the request, and does not answer: the swap happens once it goes on, or not; a watch breaks."""
    await client.swap("k", None, b"1")
    async with aclosing(client.watch("k")) as watch:
        assert await anext(watch) == b"1"
        etcd.freeze()
        with pytest.raises(OutcomeUnknown):
            await client.swap("k", b"1", b"2")
        with pytest.raises(Unavailable):
            await client.read("k")
        with pytest.raises(Unavailable):  # it has asked for a lease, and a lease alone makes no member
            await client.register("a", b"", LEASE_S)
        with pytest.raises(Unavailable):
            await anext(watch)
        etcd.thaw()
    await answered(client)
    assert await client.swap("k", b"1", b"2") in (b"2", b"1")


async def test_values_changed_by_others_are_returned_unchecked(etcd: EtcdServer, client: EtcdCoordinator) -> None:
    await client.swap("k", None, b"1")
    registration = await client.register("a", b"mine", 30.0)
    async with aclosing(client.watch("k")) as watch:
        assert await anext(watch) == b"1"
        etcd.put("/dataplane/test/values/k", "garbage \x00")
        assert await anext(watch) == b"garbage \x00"
    assert await client.swap("k", b"1", b"2") == b"garbage \x00"
    assert await client.swap("k", b"garbage \x00", b"2") == b"2"
    etcd.put("/dataplane/test/members/a", "garbage")
    assert await client.members() == {"a": b"garbage"}
    assert not await registration.renew()


async def test_a_watch_can_begin_after_a_compaction(etcd: EtcdServer, client: EtcdCoordinator) -> None:
    async with aclosing(client.watch("k")) as watch:
        assert await anext(watch) is None
        await client.swap("k", None, b"1")
        await client.swap("k", b"1", b"2")
        etcd.compact()
        assert (await until(watch, lambda value: value == b"2"))[-1] == b"2"
    async with aclosing(client.watch("k")) as watch:
        assert await anext(watch) == b"2"


async def test_one_working_endpoint_of_several_is_sufficient(etcd: EtcdServer, tmp_path: Path) -> None:
    """One where nobody listens, one that has no name, one that takes requests and answers none."""
    (tmp_path / "other").mkdir()
    with EtcdServer(tmp_path / "other") as frozen:
        frozen.freeze()
        endpoints = ["127.0.0.1:1", "no-such-host.invalid:1", frozen.address, etcd.address]
        client = EtcdCoordinator(endpoints, "test", timeout_s=4 * SHORT_S)
        try:
            assert await client.swap("k", None, b"1") == b"1"
            assert client.address.startswith(f"etcd at {etcd.address}, "), "the one that answered is asked first now"
            async with aclosing(client.watch("k")) as watch:
                assert await anext(watch) == b"1"
                await client.swap("k", b"1", b"2")
                assert await anext(watch) == b"2"
        finally:
            await client.aclose()


async def test_a_password_is_used_and_its_token_renewed(etcd: EtcdServer) -> None:
    etcd.protect("secret")
    strangers = [EtcdCoordinator([etcd.address], "test", login=login) for login in (None, ("root", "wrong"))]
    client = EtcdCoordinator([etcd.address], "test", login=("root", "secret"), timeout_s=4 * SHORT_S)
    try:
        for stranger in strangers:
            with pytest.raises(Unavailable, match="refuses"):
                await stranger.swap("k", None, b"1")
        assert await client.swap("k", None, b"1") == b"1"
        client._gateway._token = "one.that-has-run-out"
        assert await client.swap("k", b"1", b"2") == b"2"
        client._gateway._token = "one.that-has-run-out"
        async with aclosing(client.watch("k")) as watch:
            assert await anext(watch) == b"2"
        etcd.stop()
        await asyncio.to_thread(etcd.start)
        await answered(client)
        assert await client.read("k") == b"2"
    finally:
        for each in (client, *strangers):
            await each.aclose()
