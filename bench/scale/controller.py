"""The same job with one controller, a process that holds all metadata: every append, delivery and ack passes it.
With `payload`, so does every byte.

It is charged what a home of this library is charged for the same, so what differs is that there is one. Nothing else is
asked of hosts, and there are no greetings: this is the best that such a process could do.
"""

from __future__ import annotations

import numpy as np

from bench.scale.costs import Costs
from bench.scale.events import Links, Loop, Process, Processors, Signal
from bench.scale.homes import Homes, Rows
from bench.scale.job import Job


class Controller:
    """One process, and the clients of all hosts."""

    def __init__(self, job: Job, costs: Costs, *, payload: bool = False) -> None:
        self.job, self.costs, self.payload = job, costs, payload
        self.loop = Loop()
        self.processor = Processors(self.loop, 1)
        self.link = Links(self.loop, 1, job.link_bytes_s, job.latency_s)
        self.homes = Homes(1, job.group)
        self.appended: list[tuple[float, float]] = []
        self.delivered: list[tuple[float, float, int]] = []
        self._came, self._acked = Signal(), Signal()
        self._random = np.random.default_rng(job.seed)
        self._shards = 0
        for host in range(job.hosts):
            begins = float(self._random.uniform(0, job.block / job.rows_s)) if job.rows_s else 0.0
            self.loop.start(self._produce(host), begins)
            self.loop.start(self._consume(host))

    def capacity_rows_s(self) -> float:
        """Rows a second beyond which it does not keep up, whatever the hosts: of its processor and of its link."""
        job, costs = self.job, self.costs
        each = (costs.home_append(job.block) + costs.home_ack(job.block)) / job.block + costs.home_take(
            job.want
        ) / job.want
        nbytes = job.row_bytes if self.payload else 0.0
        each += nbytes / 1e9 * (costs.put_s_gb + costs.get_s_gb)
        return min(1 / each, job.link_bytes_s / nbytes if nbytes else float("inf"))

    def _serve(self, cost: float, rows: int, into: bool) -> float:
        """It does something, with the payload of so many rows."""
        nbytes = self.job.row_bytes * rows if self.payload else 0.0
        cost += nbytes / 1e9 * (self.costs.put_s_gb if into else self.costs.get_s_gb)
        done = self.processor.one(0, self.loop.now + self.job.latency_s, cost)
        if nbytes:
            way = self.link.into if into else self.link.out
            done = max(done, way.one(0, self.loop.now, nbytes / self.link.bytes_s))
        return done + self.job.latency_s

    def _produce(self, host: int) -> Process:
        job, due = self.job, self.loop.now
        while True:
            while job.rows_s is None and self.homes.came - self.homes.acked > job.ahead * job.hosts * job.block:
                yield self._acked
            began = self.loop.now
            yield self._serve(self.costs.home_append(job.block), job.block, into=True)
            self._shards += 1
            per = job.block // job.group
            rows = np.repeat(self._shards * per + np.arange(per), job.group)
            self.homes.bring(0, Rows(rows, np.full(len(rows), host), np.full(len(rows), self._shards)))
            self.loop.raise_signal(self._came)
            self.appended.append((began, self.loop.now))
            if job.rows_s is not None:
                due += job.block / job.rows_s * float(self._random.uniform(0.9, 1.1))
                yield max(self.loop.now, due)

    def _consume(self, host: int) -> Process:
        while True:
            began = self.loop.now
            while (rows := self.homes.give(0, self.job.want, self.job.least)) is None:
                yield self._came
            yield self._serve(self.costs.home_take(len(rows)), len(rows), into=False)
            self.delivered.append((began, self.loop.now, len(rows)))
            yield self._serve(self.costs.home_ack(len(rows)), 0, into=True)
            self.homes.ack(rows)
            self.loop.raise_signal(self._acked)
