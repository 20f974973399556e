"""Which nodes run servers of etcd, when too many have ended, and what becomes of steps that fail half-way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

import pytest

from dataplane.cluster import ensemble as module
from dataplane.cluster.ensemble import Ensemble
from dataplane.cluster.membership import Member, Membership
from dataplane.cluster.roster import LIST, Server, decoded, encoded, in_line
from dataplane.coordinator.base import Unavailable
from dataplane.coordinator.process import ProcessCoordinator
from dataplane.wire import auth
from tests.unit.cluster.servers import FakeCoordinator, FakeEtcd, FakeGateway, FakeServer

NODES = [f"{number:016x}" for number in range(5)]
KEY = auth.parse(auth.new())


def member(i: int, host: str = "a", *, able: bool = True, life: int = 1) -> Member:
    return Member(life, f"tcp://127.0.0.1:{i + 1}", host, serves=able)


def server(i: int, *, ready: bool = True, life: int = 1, name: str = "") -> Server:
    return Server(NODES[i], life, name or f"server-{i}", f"h:{i}1", f"h:{i}2", f"tcp://127.0.0.1:{i + 1}", ready)


def say(membership: Membership, members: dict[int, Member]) -> None:
    """These are the members."""
    membership.current = MappingProxyType({NODES[i]: each for i, each in members.items()})


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEtcd:
    etcd = FakeEtcd()
    monkeypatch.setenv("DATAPLANE_SPILL_DIR", str(tmp_path))
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    monkeypatch.setattr(module, "EtcdCoordinator", lambda *_, **__: FakeCoordinator(etcd))
    monkeypatch.setattr(module, "Gateway", lambda *_, **__: FakeGateway(etcd))
    monkeypatch.setattr(module, "EtcdServer", lambda _, place, *__, **___: FakeServer(etcd, place))
    return etcd


class Clock:
    """Seconds that pass at a word."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


Start = Callable[..., Ensemble]


@pytest.fixture
def start(etcd: FakeEtcd, clock: Clock) -> Start:
    """What the node of this number has to do with the servers."""

    def one(i: int, life: int = 1) -> Ensemble:
        membership = Membership(ProcessCoordinator(), NODES[i], member(i, life=life))
        say(membership, {each: member(each, f"host-{each}") for each in range(3)})
        membership._answers_since = 0.0
        ensemble = Ensemble(("h:1",), "test", KEY, "127.0.0.1", "127.0.0.1", membership, clock)
        ensemble._own_name = server(0).name if i == 0 else ""  # it has begun the first
        return ensemble

    return one


class Looking:
    """An ensemble that looks when it is told to."""

    def __init__(self, ensemble: Ensemble) -> None:
        self.ensemble = ensemble
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Looking:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.ensemble._own is not None:
            self.ensemble._own.cancel()
        await self._group.__aexit__(None, None, None)

    async def look(self) -> tuple[Server, ...]:
        """Look at the list as it is, do what is due, and let what has begun come to where it waits; the list then."""
        self.ensemble._saw(await self.ensemble.coordinator.read(LIST))
        return await self.tend()

    async def tend(self) -> tuple[Server, ...]:
        """The same, with the list as it was last seen."""
        await self.ensemble._tend(self._group)
        for _ in range(50):
            await asyncio.sleep(0)
        return decoded(await self.ensemble.coordinator.read(LIST))


async def give(etcd: FakeEtcd, *servers: Server, but: tuple[Server, ...] = ()) -> None:
    """These are in the list, and in etcd but for some."""
    before = await etcd.values.read(LIST)
    await etcd.values.swap(LIST, before, encoded(servers))
    for each in servers:
        if each not in but:
            etcd.add(each.place.peer_url, each.name)


def test_two_members_have_one_server_and_three_have_three() -> None:
    two = {NODES[i]: member(i) for i in range(2)}
    assert in_line(two, {NODES[0]}) == []
    four = {NODES[i]: member(i) for i in range(4)}
    assert in_line(four, {NODES[0]}) == [NODES[1], NODES[2], NODES[3]]
    assert in_line(four, {NODES[0], NODES[1]})[0] == NODES[2]
    assert in_line(four, {NODES[0], NODES[1], NODES[2]}) == []


def test_other_machines_come_first_and_who_has_no_etcd_is_passed_over() -> None:
    given = [("a", True), ("a", True), ("b", False), ("b", True), ("a", True)]
    members = {NODES[i]: member(i, host, able=able) for i, (host, able) in enumerate(given)}
    assert in_line(members, {NODES[0]})[0] == NODES[3]
    assert in_line(members, {NODES[0], NODES[3]})[0] == NODES[1], "better than none"
    few = {NODES[i]: member(i, host, able=able) for i, (host, able) in enumerate([("a", True), ("b", False)])}
    assert in_line(few | {NODES[2]: member(2, "c")}, {NODES[0]}) == [], "a second server alone would be in the way"


@pytest.mark.parametrize(
    ("ready", "ended", "lost"), [(1, 0, False), (1, 1, True), (2, 1, True), (3, 1, False), (3, 2, True)]
)
def test_they_are_lost_when_the_rest_is_no_majority(start: Start, ready: int, ended: int, lost: bool) -> None:
    ensemble = start(0)
    say(ensemble._membership, {i: member(i) for i in range(5)})
    ensemble.servers = tuple(server(i) for i in range(1, ready + 1))
    ensemble._membership._ended = {node: ensemble._membership.current[node] for node in NODES[1 : ended + 1]}
    assert ensemble.lost() == lost


@pytest.mark.parametrize("promoted", [False, True])
async def test_of_one_that_may_have_been_promoted_the_servers_are_asked(
    etcd: FakeEtcd, start: Start, promoted: bool
) -> None:
    """One of two that vote has ended, while a third was about to: it votes in etcd before the list says so."""
    late = server(3, ready=False)
    await give(etcd, server(1), server(2), but=(server(1), server(2)))
    await give(etcd, server(1), server(2), late, but=(late,))
    etcd.add(late.place.peer_url, learner=not promoted)
    ensemble = start(0)
    say(ensemble._membership, {i: member(i) for i in range(5)})
    ensemble._saw(await etcd.values.read(LIST))
    ensemble._membership._ended = {NODES[1]: member(1)}
    assert not ensemble.lost(), "it is not certain"
    await ensemble.look()
    assert ensemble.lost() != promoted
    ensemble._saw(await etcd.values.read(LIST))
    assert not ensemble.lost(), "etcd has answered since"


async def test_one_that_was_promoted_and_ended_before_the_list_said_so_is_counted(etcd: FakeEtcd, start: Start) -> None:
    """The one that the list names lives, and can never answer again."""
    late = server(2, ready=False)
    await give(etcd, server(1), late)
    ensemble = start(0)
    say(ensemble._membership, {i: member(i) for i in range(5)})
    ensemble._saw(await etcd.values.read(LIST))
    ensemble._membership._ended = {NODES[2]: member(2)}
    assert not ensemble.lost()
    await ensemble.look()
    assert ensemble.lost()


def test_a_server_whose_node_was_never_a_member_here_is_looked_at_and_may_have_ended(start: Start) -> None:
    """It ran the only server, and was killed before it had registered."""
    ensemble = start(0)
    ensemble.servers = (server(4),)
    assert not ensemble.lost()
    assert ensemble.strangers() == [server(4)]
    ensemble.ended(server(4))
    assert ensemble.lost()
    assert ensemble.strangers() == []


async def test_they_are_over_when_their_ends_were_known_and_not_when_somebody_looks(
    etcd: FakeEtcd, start: Start
) -> None:
    """Followers go by it: who looks late is not to take their right from them."""
    ensemble = start(0)
    say(ensemble._membership, {i: member(i) for i in range(3)})
    await give(etcd, server(1), server(2))
    ensemble._saw(await etcd.values.read(LIST))
    ensemble._membership._registered = {NODES[i]: (member(i), b"") for i in (1, 2)}
    known = []
    for i in (1, 2):
        ensemble._membership.ended(NODES[i], member(i).life, 0.0)
        known.append(ensemble._membership.ended_by(NODES[i]))
    assert known[0] < known[1]
    assert ensemble.over_s() == known[1]


async def test_a_list_that_somebody_changed_is_left_as_it_is_and_told_once(
    etcd: FakeEtcd, start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    await give(etcd, server(0))
    async with Looking(start(1)) as one:
        await one.look()
        before = await etcd.values.read(LIST)
        await etcd.values.swap(LIST, before, b"[wrong")
        for _ in range(2):
            with pytest.raises(Unavailable, match="left as it is"):
                await one.look()
            with pytest.raises(Unavailable):
                await one.ensemble._change(lambda _: ())
        assert await etcd.values.read(LIST) == b"[wrong"
        assert one.ensemble.servers == decoded(before)
        assert caplog.text.count("Put the list back") == 1
        await etcd.values.swap(LIST, b"[wrong", before)
        assert (await one.look())[0] == server(0)


async def test_they_grow_to_three_one_after_the_other(etcd: FakeEtcd, start: Start) -> None:
    await give(etcd, server(0))
    async with Looking(start(1)) as second, Looking(start(2)) as third:
        await third.look()
        assert not etcd.running, "it is not its turn"
        found = await second.look()
        assert [(each.node, each.ready) for each in found] == [(NODES[0], True), (NODES[1], True)]
        found = await third.look()
        assert [(each.node, each.ready) for each in found] == [(NODES[i], True) for i in range(3)]
        assert len(etcd.members) == 3
        assert not any(each.isLearner for each in etcd.members.values())
    assert not etcd.running


async def test_what_is_left_over_in_etcd_is_taken_out_until_it_is_gone(etcd: FakeEtcd, start: Start) -> None:
    """Also where the server that was asked did not know of it yet."""
    await give(etcd, server(0))
    async with Looking(start(0)) as first:
        await first.look()
        late = etcd.members.pop(1)
        await first.ensemble._take_out()
        etcd.members[1] = late
        number = etcd.add("https://left-over", learner=True)
        await first.look()
        assert number not in etcd.members


async def test_an_entry_of_ones_own_that_nobody_runs_is_taken_out_and_another_made(
    etcd: FakeEtcd, start: Start
) -> None:
    """Its node could not take it out when it failed, since etcd did not answer then."""
    await give(etcd, server(0), server(1, ready=False), but=(server(1, ready=False),))
    async with Looking(start(1)) as second:
        found = await second.look()
        assert [each.node for each in found if each.ready] == [NODES[0], NODES[1]]
        assert "server-1" not in {each.name for each in found}


async def test_a_server_that_others_took_out_ends_and_another_is_begun(etcd: FakeEtcd, start: Start) -> None:
    await give(etcd, server(0))
    async with Looking(start(1)) as second:
        await second.look()
        [name] = etcd.running
        await give(etcd, server(0), but=(server(0),))
        voted = set(etcd.members)

        async def still_runs() -> None:
            assert name in etcd.running, "of two that vote, one alone can not take the other out"

        etcd.before["cluster/member/remove"] = still_runs
        found = await second.look()
        assert voted - set(etcd.members)
        assert name not in etcd.running
        assert [each.node for each in found if each.ready] == [NODES[0], NODES[1]]


async def test_a_server_that_the_list_says_votes_and_does_not_is_promoted(etcd: FakeEtcd, start: Start) -> None:
    await give(etcd, server(0), server(1), but=(server(1),))
    number = etcd.add(server(1).place.peer_url, learner=True)
    etcd.running["it"] = FakeServer(etcd, server(1).place)
    async with Looking(start(0)) as first:
        await first.look()
    assert not etcd.members[number].isLearner


async def test_a_promotion_whose_answer_is_lost_is_not_made_twice(etcd: FakeEtcd, start: Start) -> None:
    async def lose() -> None:
        etcd.after.clear()
        raise module.OutcomeUnknown("it has not answered")

    etcd.after["cluster/member/promote"] = lose
    await give(etcd, server(0))
    ensemble = start(1)
    ensemble._saw(await ensemble.coordinator.read(LIST))
    async with Looking(ensemble):
        number = etcd.add(server(1).place.peer_url, learner=True)
        etcd.running["it"] = FakeServer(etcd, server(1).place)
        async with asyncio.timeout(10):
            await ensemble._promote(number)
    assert not etcd.members[number].isLearner


async def test_a_server_that_ends_at_once_is_tried_again_elsewhere_and_later_each_time(
    etcd: FakeEtcd, start: Start, clock: Clock
) -> None:
    """Another program has taken its port."""
    etcd.fails = True
    await give(etcd, server(0))
    async with Looking(start(1)) as second:
        for pause_s in (2.0, 4.0, 8.0):
            await second.look()
            tried = len(etcd.starts)
            assert [each.node for each in await second.look()] == [NODES[0]], "nothing is left of it"
            clock.now += pause_s - 0.1
            await second.look()
            assert len(etcd.starts) == tried
            clock.now += 0.2
        etcd.fails = False
        found = await second.look()
        assert [each.node for each in found if each.ready] == [NODES[0], NODES[1]]
    assert len({place.servers for place in etcd.starts}) == len(etcd.starts)


async def test_where_the_next_in_line_does_not_manage_the_one_after_it_does(
    etcd: FakeEtcd, start: Start, clock: Clock
) -> None:
    await give(etcd, server(0))
    async with Looking(start(2)) as third:
        await third.look()
        clock.now += 9.0
        await third.look()
        assert not etcd.starts
        clock.now += 2.0
        found = await third.look()
    assert [each.node for each in found if each.ready] == [NODES[0], NODES[2]]


async def test_two_that_add_themselves_at_once_do_not_both(etcd: FakeEtcd, start: Start) -> None:
    await give(etcd, server(0))
    async with Looking(start(1)) as second, Looking(start(2)) as third:
        for each in (second.ensemble, third.ensemble):
            each._saw(await each.coordinator.read(LIST))
        another = asyncio.ensure_future(third.ensemble._join(third.ensemble._new_server()))
        await second.tend()
        assert len(etcd.running) == 1
        another.cancel()
        await asyncio.gather(another, return_exceptions=True)
