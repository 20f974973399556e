"""The hosts of a simulation: their nodes' processors by what they are spent on, their links, what they ask.

A node is one thread; so is a client. What goes to many nodes at once is one event: each of them serves it in the order
in which it comes. So is what a node has to greet in a twentieth of a second.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bench.scale.costs import Costs
from bench.scale.events import Floats, Index, Links, Loop, Process, Processors, Shared
from bench.scale.job import Job
from dataplane.cluster.placement import Placement
from dataplane.cluster.static import BEAT_S

_SLICES = 20  # in which a beat's greetings are done
_GREET_BYTES = 120.0


class Cluster:
    """Nodes and clients, with what each did."""

    def __init__(self, job: Job, costs: Costs) -> None:
        self.job, self.costs, self.loop = job, costs, Loop()
        count = 2 * job.hosts
        self.processors = Processors(self.loop, count) if job.cores is None else Shared(self.loop, count, job.cores)
        self.links = Links(self.loop, job.hosts, job.link_bytes_s, job.latency_s)
        self.nodes = np.arange(job.hosts)
        self.random = np.random.default_rng(job.seed)
        names = [self.random.bytes(8) for _ in range(job.hosts)]
        self.placement = Placement(names)
        self.spent: dict[str, Floats] = defaultdict(lambda: np.zeros(job.hosts))
        """By what nodes do, the seconds of each."""
        self.messages: dict[str, float] = defaultdict(float)
        """Requests between nodes."""
        self.look = costs.member_look(job.hosts)
        if job.greetings and job.hosts > 1:
            self.loop.start(self._greet())

    def others(self, node: int) -> Index:
        """All nodes but this."""
        return np.delete(self.nodes, node)

    def client(self, host: int, when: float, cost: float) -> float:
        """The host's client computes; when it is done."""
        return self.processors.one(self.job.hosts + host, when, cost)

    def node(self, host: int, when: float, cost: float, what: str) -> float:
        """The host's node does; when it is done."""
        self.spent[what][host] += cost
        return self.processors.one(host, when, cost)

    def ask(self, host: int, homes: Index, ask: float, costs: Floats | float, what: str) -> Process:
        """A node asks others, each of which does what costs so much; ends when it has all answers. Half of what asking
        costs is before the question and half after the answer."""
        if not len(homes):
            return
        self.messages[what] += len(homes)
        each = ask + 3 * self.look
        done = self.node(host, self.loop.now, each / 2 * len(homes), what)
        sent: Floats = done - each / 2 * np.arange(len(homes) - 1, -1, -1, dtype=np.float64)
        costs = costs + 2 * self.look
        self.spent[what][homes] += costs
        answered = self.processors.many(homes, sent + self.job.latency_s, costs)
        yield float(answered.max()) + self.job.latency_s
        yield self.node(host, self.loop.now, each / 2 * len(homes), what)

    def each(self, nodes: Index, when: float, costs: Floats, what: str) -> float:
        """These nodes, which may be named more than once, each do something; when the last is done."""
        summed = np.bincount(nodes, costs, self.job.hosts)
        chosen = np.flatnonzero(summed)
        self.spent[what] += summed
        return float(self.processors.many(chosen, when, summed[chosen]).max()) if len(chosen) else when

    def _greet(self) -> Process:
        others = self.job.hosts - 1
        cost = others / _SLICES * (self.costs.greet(self.job.hosts) + self.costs.greeted(self.job.hosts))
        # `greeted_bytes` is a line of bytes, not of microseconds.
        nbytes = others / _SLICES * (self.costs.greeted_bytes(self.job.hosts) * 1e6 + _GREET_BYTES)
        while True:
            self.spent["greet"] += cost
            self.messages["greet"] += others * self.job.hosts / _SLICES
            self.processors.many(self.nodes, self.loop.now, cost)
            for way in (self.links.out, self.links.into):
                way.many(self.nodes, self.loop.now, nbytes / self.links.bytes_s)
            yield self.loop.now + BEAT_S / _SLICES
