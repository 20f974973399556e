"""Clients of several hosts use one stream while nodes are killed, stopped and continued, and join; each writes down
what it was told, and at the end the rules of streams are held against all of it (`tests.chaos.history`).

What happens is drawn from a seed; "away" stops a node for so long that others lead what it led.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.cases import each_case
from tests.chaos.history import NEEDS, TASKS, History, reward, values
from tests.etcd import EtcdServer, needs_etcd
from tests.integration.test_hosts import Host, members, together
from tests.processes import WAIT_S, eventually

pytestmark = needs_etcd

FAULTS = ["kill", "stop", "join", "nothing"]
LASTS_S = 3.0
AWAY_S = 4.5  # longer than a leader may be silent
MAX_ROWS = 400
STEP = 1 << 20  # numbers of rows of one producer
GROUPS = [f"prompt-{i}" for i in range(40)]


class Client(threading.Thread):
    """A producer or consumer on one host, as its seed has it."""

    def __init__(self, run: Run, host: int, number: int) -> None:
        super().__init__(name=f"client {number} of host {host}")
        self._run = run
        self._host = host
        self._address = run.hosts[host].address
        self._chance = random.Random(f"{run.seed} {number}")
        self._next = number * STEP
        self._turn = self._produce if number % 2 == 0 else self._consume
        self._history = run.history

    def run(self) -> None:
        try:
            with dp.connect(self._address) as plane:
                stream = plane.stream("rollouts")
                while not self._run.over.is_set():
                    self._turn(stream)
        except dp.PeerUnavailable as error:
            if not self._gone():
                self._history.wrong.append(f"{self.name} ended with {error!r}")
        except BaseException as error:
            if not self._gone():
                self._history.wrong.append(f"{self.name} ended with {type(error).__name__}: {error}")

    def _gone(self) -> bool:
        return self._host in self._history.killed

    # appending

    def _produce(self, stream: Any) -> None:
        count = self._chance.randrange(1, 9)
        numbers = list(range(self._next, self._next + count))
        self._next += count
        how: dict[str, Any] = {"version": numbers, "tags": {"n": numbers}}
        if self._chance.random() < 0.7:
            how["group"] = [self._chance.choice(GROUPS) for _ in numbers]
        if self._chance.random() < 0.4:
            how["keys"] = [f"row-{number}" for number in numbers]
        for _ in range(5):
            began = time.monotonic()
            try:
                stream.append({"id": numbers, "x": values(numbers)}, timeout=1.0, **how)
            except (dp.PeerUnavailable, dp.OutcomeUnknown, dp.LeaseExpired, dp.Backpressure, dp.OwnerDied) as error:
                refused = isinstance(error, dp.Backpressure)
                self._history.told("append", numbers, self._host, began, done=False, why=type(error).__name__)
                if self._gone():
                    raise
                if self._run.over.is_set() or (not refused and "keys" not in how):
                    return
            else:
                self._history.told("append", numbers, self._host, began)
                break
        self._run.over.wait(self._chance.random() * 0.05)

    # consuming

    def _consume(self, stream: Any) -> None:
        self.turn(stream, self._chance.choice(TASKS), self._chance.random())

    def turn(self, stream: Any, task: str, how: float, timeout: float = 0.3) -> None:
        """Take some rows, and ack them, or not, by how much `how` is."""
        began = time.monotonic()
        lease_s = 10.0 if how < 0.8 else 0.3
        rows = self._chance.choice([1, 4, 16, 64])
        try:
            delivery = stream.consume(task, rows=rows, columns=NEEDS[task], lease=lease_s, timeout=timeout).__enter__()
        except (dp.NotReady, dp.PeerUnavailable, dp.OutcomeUnknown):
            if self._gone():
                raise
            return
        numbers = [int(version) for version in delivery.versions]
        self._history.told("deliver", numbers, self._host, began, task)
        try:
            self._look_at(delivery, task, numbers)
        except (dp.PeerUnavailable, dp.Lost) as error:
            self._history.told(
                "get", numbers, self._host, began, task, done=False, why=f"{type(error).__name__} {error}"
            )
            self._answer(delivery, task, numbers, done=False)
            return
        if task == "reward" and not self._extend(stream, delivery, numbers, replace=False):
            self._answer(delivery, task, numbers, done=False)
        elif how >= 0.9:
            delivery._inner.settled = True  # it lets the lease end
        elif how >= 0.8:
            self._run.over.wait(lease_s * 2)
            self._answer(delivery, task, numbers, done=True)
        else:
            self._answer(delivery, task, numbers, done=how < 0.7)

    def _look_at(self, delivery: Any, task: str, numbers: list[int]) -> None:
        batch = delivery.get()
        fine = [int(i) for i in batch["id"].to_list()] == numbers == delivery.tags["n"]
        if "x" in NEEDS[task]:
            fine = fine and bool((batch["x"].numpy() == values(numbers)).all())
        if "reward" in NEEDS[task]:
            fine = fine and bool((batch["reward"].numpy() == reward(numbers)).all())
        if not fine:
            self._history.wrong.append(f"{task!r} was delivered other columns than those of rows {numbers}")

    def _extend(self, stream: Any, delivery: Any, numbers: list[int], *, replace: bool) -> bool:
        began, why = time.monotonic(), ""
        try:
            stream.extend(delivery.ref, {"reward": reward(numbers)}, replace=replace, timeout=5.0)
        except (
            dp.PeerUnavailable,
            dp.OutcomeUnknown,
            dp.LeaseExpired,
            dp.Misuse,
            dp.Backpressure,
            dp.OwnerDied,
        ) as error:
            why = f"{type(error).__name__} {error}"
        self._history.told("extend", numbers, self._host, began, "reward", not why, why)
        return not why

    def _answer(self, delivery: Any, task: str, numbers: list[int], *, done: bool) -> None:
        began, why = time.monotonic(), ""
        try:
            delivery.ack() if done else delivery.nack()
        except (dp.LeaseExpired, dp.PeerUnavailable, dp.OutcomeUnknown, dp.Closed) as error:
            why = type(error).__name__
        delivery._inner.settled = True
        self._history.told("ack" if done else "nack", numbers, self._host, began, task, not why, why)


class Run:
    """One history: hosts, their clients, and what befalls them."""

    def __init__(self, seed: int, directory: Path, stack: ExitStack, faults: list[str]) -> None:
        self.seed = seed
        self._faults = faults
        self.history = History()
        self.over = threading.Event()
        self.hosts: list[Host] = []
        self._stack = stack
        self._directory = directory
        self._etcd = stack.enter_context(EtcdServer(directory))
        self._chance = random.Random(seed)
        self._clients: list[Client] = []
        self._planes: dict[int, Any] = {}

    def _join(self) -> int:
        """One more host, with a plane of the test's own."""
        host = self._stack.enter_context(
            Host(self._directory / str(len(self.hosts)), f"etcd://{self._etcd.address}/run")
        )
        self.hosts.append(host)
        number = len(self.hosts) - 1
        self._planes[number] = self._stack.enter_context(dp.connect(host.address))
        return number

    def _living(self) -> list[Host]:
        return [host for number, host in enumerate(self.hosts) if number not in self.history.killed]

    def _start(self, host: int) -> None:
        """Two clients on it."""
        for _ in range(2):
            client = Client(self, host, len(self._clients))
            self._clients.append(client)
            client.start()

    @property
    def planes(self) -> list[Any]:
        """Those whose nodes live."""
        return [plane for number, plane in self._planes.items() if number not in self.history.killed]

    def run(self) -> None:
        """Do all of it. Raises AssertionError with what was broken."""
        for _ in range(3):
            self._join()
        together(*self.planes)
        limits = {"max_rows": MAX_ROWS} if self._chance.random() < 0.5 else {}
        stream = self.planes[0].stream("rollouts", tasks=list(TASKS), max_deliveries=255, **limits)
        try:
            for number in range(3):
                self._start(number)
            until = time.monotonic() + LASTS_S
            while time.monotonic() < until:
                time.sleep(self._chance.random() * 0.5)
                self._befall(self._chance.choice(self._faults))
                if limits:
                    self._measure()
        finally:
            self.over.set()
            for client in self._clients:
                client.join(WAIT_S)
        assert not any(client.is_alive() for client in self._clients), self._told("a client hangs")
        together(*self.planes)
        self._drain()
        broken = self.history.broken()
        assert not broken, self._told("\n".join(broken))
        for number in self._planes.keys() - self.history.killed:
            self._check_nothing_held(number)
        stream = self.planes[0].stream("rollouts")
        stream.drop()

    def _told(self, what: str) -> str:
        return f"seed {self.seed}: {what}"

    # faults

    def _befall(self, what: str) -> None:
        number = self._chance.choice([n for n in range(len(self.hosts)) if n not in self.history.killed])
        began = time.monotonic()
        match what:
            case "kill" if len(self._living()) > 2:
                self.history.killed.add(number)
                self.hosts[number].kill()
                gone = set(range(len(self.hosts))) - self.history.killed
                eventually(lambda: all(len(members(p)) == len(gone) for p in self.planes), "the dead are noticed")
            case "stop" | "away":
                self.hosts[number].freeze()
                time.sleep(AWAY_S if what == "away" else 0.3)
                self.hosts[number].thaw()
                together(*self.planes)
            case "join" if len(self.hosts) < 4:
                number = self._join()
                together(*self.planes)
                self._start(number)
            case _:
                return
        self.history.told("fault", (), number, began, why=what)

    def _planes_rows(self) -> int:
        return int(self._chance.choice(self.planes).stream("rollouts").stats()["rows"])

    def _measure(self) -> None:
        """Each partition is asked by itself, so rows may be counted that have gone since."""
        with suppress(dp.PeerUnavailable, dp.OutcomeUnknown):
            until = time.monotonic() + WAIT_S
            while (rows := self._planes_rows()) > MAX_ROWS:
                if time.monotonic() > until:
                    self.history.wrong.append(f"{rows} rows, where {MAX_ROWS} are the most")
                    return
                time.sleep(0.05)

    # the end

    def _drain(self) -> None:
        """Close the stream, and do what is left of it."""
        living = [number for number in self._planes if number not in self.history.killed]
        stream = self._planes[living[0]].stream("rollouts")
        stream.close()
        last = Client(self, living[-1], len(self._clients))
        for task in TASKS:
            on = self._planes[living[-1]].stream("rollouts")
            until = time.monotonic() + WAIT_S
            while True:
                try:
                    last.turn(on, task, 0.0, timeout=1.0)
                except dp.Closed:
                    break
                assert time.monotonic() < until, self._told(f"{task!r} is never done: {on.stats()}")
        self.history.lost += [row.version for plane in self.planes for row in plane.stream("rollouts").lost()]

    def _check_nothing_held(self, number: int) -> None:
        plane, host = self._planes[number], self.hosts[number]

        def freed() -> bool:
            stats = plane.stats()
            return bool(stats.put_bytes == stats.freed_bytes)

        try:
            eventually(freed, "what was put there is freed")
            eventually(lambda: not any(host.facts()["streams"].values()), "nothing is held")
        except AssertionError as error:
            stats = plane.stats()
            facts = host.facts()["streams"]
            more = f"host {number}: put {stats.put_bytes}, freed {stats.freed_bytes}, {facts}, {stats.shards} shards"
            raise AssertionError(self._told(f"{error}\n{more}\n" + self.history.story(-1))) from None


def perform(seed: int, faults: list[str]) -> None:
    """Run the history of one seed."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        Run(seed, Path(directory), stack, faults).run()


@pytest.mark.parametrize(
    "seed", [pytest.param(5, marks=pytest.mark.long), 16, pytest.param(71, marks=pytest.mark.long)]
)
def test_a_history(seed: int) -> None:
    perform(seed, FAULTS)


@pytest.mark.long
@each_case("seed", [126, 127])
def test_a_history_of_nodes_that_come_back(seed: int) -> None:
    perform(seed, ["away", "stop", "join"])


def test_the_rules_find_what_is_broken() -> None:
    """Each of them, in a history that breaks it and no other."""

    def broken(*events: tuple[Any, ...], killed: int = 9, lost: list[int] = []) -> list[str]:  # noqa: B006
        history = History(killed={killed}, lost=lost)
        history.told("append", [1, 2], 0, 0.0)
        for what, rows, task, began in events:
            history.told(what, rows, 0, began, task)
        return [each.splitlines()[0] for each in history.broken()]

    fine = [("ack", [1, 2], task, 0.0) for task in TASKS]
    later = time.monotonic() + 60
    assert broken(*fine) == []
    assert broken(*fine[1:]) == ["2 rows were never acked by 'reward', and their columns survived: [1, 2]"]
    assert broken(*fine[1:], killed=0) == [], "they did not survive"
    assert broken(*fine, ("ack", [2], "log", 0.0)) == ["1 rows were acked twice by 'log': [2]"]
    assert broken(*fine, ("deliver", [1], "log", 0.0)) == []
    again = ["1 rows were delivered again to 'log' after it had acked them: [1]"]
    assert broken(*fine, ("deliver", [1], "log", later)) == again
    assert broken(*fine, lost=[2]) == ["1 rows were told as lost, and their columns survived: [2]"]
    assert broken(*fine, killed=0, lost=[2, 2]) == ["1 rows were told twice as lost: [2]"]
