"""Replicas on a bench: each message and each change is delivered by hand, and time passes when it is told to."""

from __future__ import annotations

from dataplane.errors import DataplaneError
from dataplane.replication.configuration import Configuration, ReplicaId
from dataplane.replication.effects import Answer, Effect, Refuse, Send, Store, Swap
from dataplane.replication.machine import Decision, StateMachine
from dataplane.replication.messages import Message
from dataplane.replication.replica import Replica
from dataplane.replication.settings import Settings
from dataplane.replication.storage import Operation, Stored

A, B, C = ("a", 1), ("b", 1), ("c", 1)

SETTINGS = Settings(lease_s=1.0, grace_s=1.5, drift=0.01, beat_s=0.25, retry_s=0.5, max_batch=4, snapshot_every=6)


class Words(StateMachine):
    """Keeps the words that it is told; `?` asks for them; `no…` is refused; `a,b` are two commands."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.forgotten = 0

    def decide(self, request: bytes, term: int, now: float) -> Decision:
        if request == b"?":
            return Decision((), " ".join(self.words).encode())
        if request.startswith(b"no"):
            raise DataplaneError("refused")
        return Decision(tuple(request.split(b",")))

    def apply(self, command: bytes) -> bytes:
        self.words.append(command.decode())
        return str(len(self.words)).encode()

    def snapshot(self) -> bytes:
        return " ".join(self.words).encode()

    def restore(self, state: bytes) -> None:
        self.words = state.decode().split()

    def forget(self) -> None:
        self.forgotten += 1


class Bench:
    """Some replicas, and what they have sent that has not arrived."""

    def __init__(self, *names: ReplicaId, settings: Settings = SETTINGS) -> None:
        self.settings = settings
        self.now = 100.0
        self.replicas: dict[ReplicaId, Replica] = {}
        self.machines: dict[ReplicaId, Words] = {}
        self.mail: list[tuple[ReplicaId, ReplicaId, Message]] = []  # (from, to, message)
        self.swaps: list[tuple[ReplicaId, Swap]] = []
        self.answers: dict[int, bytes | DataplaneError] = {}
        self.stores: dict[ReplicaId, list[tuple[int, Operation]]] = {}
        self.cut: set[ReplicaId] = set()
        self.configuration = Configuration(1, names[0], names[1:])
        self._request = 0
        for name in names:
            self.add(name, Stored())

    def add(self, name: ReplicaId, stored: Stored) -> Replica:
        """A replica with a log, that has read the configuration."""
        self.machines[name] = Words()
        self.stores[name] = []
        self.replicas[name] = Replica(name, self.settings, self.machines[name], stored, self.now)
        self.do(name, self.replicas[name].configured(self.configuration, self.now))
        return self.replicas[name]

    def do(self, name: ReplicaId, effects: list[Effect]) -> list[Effect]:
        for effect in effects:
            if isinstance(effect, Send):
                self.mail.append((name, effect.to, effect.message))
            elif isinstance(effect, Swap):
                self.swaps.append((name, effect))
            elif isinstance(effect, Answer):
                self.answers[effect.request] = effect.result
            elif isinstance(effect, Refuse):
                self.answers[effect.request] = effect.error
            elif isinstance(effect, Store):
                self.stores[name].append((effect.ticket, effect.operation))
        return effects

    def deliver(self, *, rounds: int = 20) -> None:
        """Deliver messages until there are none, but for those from or to who is cut off: they are lost."""
        for _ in range(rounds):
            mail, self.mail = self.mail, []
            for sender, to, message in mail:
                self.hand(sender, to, message)
            if not self.mail:
                return

    def hand(self, sender: ReplicaId, to: ReplicaId, message: Message) -> None:
        if to in self.replicas and not {sender, to} & self.cut:
            self.do(to, self.replicas[to].receive(sender, message, self.now))

    def decide(self) -> None:
        """Let the coordinator do what was asked, in the order asked, and tell those who asked."""
        swaps, self.swaps = self.swaps, []
        for name, swap in swaps:
            if swap.expected == self.configuration:
                self.configuration = swap.wanted
            self.do(name, self.replicas[name].configured(self.configuration, self.now))

    def watch(self) -> None:
        """Tell all who are not cut off what the configuration is."""
        for name, replica in self.replicas.items():
            if name not in self.cut:
                self.do(name, replica.configured(self.configuration, self.now))

    def pass_time(self, seconds: float, *, deliver: bool = True) -> None:
        """Let time pass, and everybody do what is due."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.05)
            for name, replica in self.replicas.items():
                if replica.deadline <= self.now:
                    self.do(name, replica.tick(self.now))
            if deliver:
                self.deliver()

    def begin(self) -> None:
        """Until the first leader serves."""
        self.decide()
        self.deliver()
        self.pass_time(self.settings.grace_s + 0.1)
        assert self.replicas[self.configuration.leader].serves(self.now)

    def ask(self, name: ReplicaId, request: str) -> int:
        self._request += 1
        self.do(name, self.replicas[name].request(self._request, request.encode(), self.now))
        return self._request

    def words(self, name: ReplicaId) -> str:
        return " ".join(self.machines[name].words)
