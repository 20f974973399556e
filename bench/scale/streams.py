"""A stream of this library on the hosts of a simulation: appends split over homes, deliveries gathered from them, acks
told to who stores the columns; with a limit, one node that keeps it.

It does in the order of `dataplane.node` what that does, where it asks others: `bringing`, `gathering`, `telling`,
`limits`.
Left out: tables, extends, leases that end, rows that move, a client's own sampler.
"""

from __future__ import annotations

import heapq
from typing import Any

import numpy as np

from bench.scale.cluster import Cluster
from bench.scale.costs import Costs
from bench.scale.events import Index, Process, Signal
from bench.scale.homes import WINDOW, Homes, Rows
from bench.scale.job import Job

_NAME = "rollouts"
_IN_A_ROW = 8  # as `node.spread.gathering`
_HOT = -1

Granted = list[tuple[int, Rows]]


class Stream:
    """One stream, which all hosts append to and consume."""

    def __init__(self, job: Job, costs: Costs) -> None:
        self.job, self.costs = job, costs
        self.cluster = Cluster(job, costs)
        self.loop = self.cluster.loop
        self.homes = Homes(job.hosts, job.group)
        self.appended: list[tuple[float, float]] = []
        self.delivered: list[tuple[float, float, int]] = []
        self.lost_races = 0
        self._shards = 0
        self._hot = int(self.cluster.placement.homes(_NAME, [_HOT])[0])
        self._keeper = int(self.cluster.placement.homes("", [_NAME])[0])
        self._telling, self._changed = np.zeros(job.hosts, bool), np.zeros(job.hosts, bool)
        self._waiting: list[tuple[int, int, Signal]] = []  # rows that must have come, a number, who waits
        self._numbers = 0
        self._acked = Signal()
        for host in range(job.hosts):
            begins = float(self.cluster.random.uniform(0, job.block / job.rows_s)) if job.rows_s else 0.0
            self.loop.start(self._produce(host), begins)
            self.loop.start(self._consume(host))

    @property
    def over(self) -> bool:
        """Whether all that was to be appended is acked."""
        job = self.job
        return job.appends is not None and self.homes.acked >= job.hosts * job.appends * job.block

    # producing

    def _produce(self, host: int) -> Process:
        job, number, due = self.job, 0, self.loop.now
        while job.appends is None or number < job.appends:
            while job.rows_s is None and self.homes.came - self.homes.acked > job.ahead * job.hosts * job.block:
                yield self._acked
            began = self.loop.now
            yield from self._append(host, number)
            self.appended.append((began, self.loop.now))
            number += 1
            if job.rows_s is not None:
                due += job.block / job.rows_s * float(self.cluster.random.uniform(0.9, 1.1))
                yield max(self.loop.now, due)

    def _append(self, host: int, number: int) -> Process:
        job, costs, cluster = self.job, self.costs, self.cluster
        yield cluster.client(host, self.loop.now, costs.client_append(job.block)) + job.local_s
        if job.limited:
            yield from self._admit(host)
        yield cluster.node(host, self.loop.now, costs.front_append(job.block), "append")
        shares = self._shares(host, number)
        homes = np.fromiter(shares, np.int64, len(shares))
        away = homes[homes != host]
        counts = np.array([len(shares[home]) for home in away.tolist()], float)
        ask = costs.ask_append.base + costs.ask_append.each * (counts.mean() if len(away) else 0.0)
        at_home = (costs.home_append.base + costs.home_append.each * counts) * 1e-6
        yield from cluster.ask(host, away, ask * 1e-6, at_home, "append")
        if host in shares:
            own = costs.home_append(len(shares[host])) - costs.home_watch * 1e-6
            yield cluster.node(host, self.loop.now, max(0.0, own), "append")
        for home, rows in shares.items():
            self.homes.bring(home, rows)
        self._wake()
        if job.limited:
            self._tell_keeper(homes)
        yield self.loop.now + job.local_s

    def _shares(self, host: int, number: int) -> dict[int, Rows]:
        """The rows of one append, by home."""
        job, self._shards = self.job, self._shards + 1
        if job.hot and self.cluster.random.random() < job.hot:
            groups, homes = np.full(job.block // job.group, _HOT), np.array([self._hot])
            groups = -2 - self._shards * len(groups) - np.arange(len(groups))  # complete by themselves, at one home
            homes = np.repeat(homes, len(groups))
        else:
            per = job.block // job.group
            groups = (host * (1 << 24) + number) * per + np.arange(per)
            homes = self.cluster.placement.homes(_NAME, groups.tolist())
        found = {}
        for home in np.unique(homes).tolist():
            rows = np.repeat(groups[homes == home], job.group)
            found[home] = Rows(rows, np.full(len(rows), host), np.full(len(rows), self._shards))
        return found

    # limits

    def _admit(self, host: int) -> Process:
        cost = self.costs.keeper_admits(self.job.hosts)
        yield from self._ask_keeper(host, cost + self.costs.home_watch * 1e-6)
        # What was admitted has come: told, and not waited for.
        self.loop.start(self._ask_keeper(host, self.costs.home_watch * 1e-6), self.loop.now)

    def _ask_keeper(self, host: int, cost: float) -> Process:
        if host == self._keeper:
            yield self.cluster.node(host, self.loop.now, cost, "limits")
        else:
            yield from self.cluster.ask(host, np.array([self._keeper]), self.costs.ask_watch * 1e-6, cost, "limits")

    def _tell_keeper(self, homes: Index) -> None:
        if not self.job.limited:
            return
        self._changed[homes] = True
        for home in homes[~self._telling[homes]].tolist():
            self._telling[home] = True
            self.loop.start(self._tell(home), self.loop.now)

    def _tell(self, home: int) -> Process:
        """A part tells what it holds, one message at a time, for as long as there is news."""
        while self._changed[home]:
            self._changed[home] = False
            yield self.cluster.node(home, self.loop.now, self.costs.holds(self.job.hosts), "limits")
            told = self.costs.keeper_told(self.job.hosts) + self.costs.home_watch * 1e-6
            yield from self._ask_keeper(home, told)
        self._telling[home] = False

    # consuming

    def _consume(self, host: int) -> Process:
        job, costs, cluster, in_a_row = self.job, self.costs, self.cluster, 0
        while not self.over:
            began = self.loop.now
            yield cluster.client(host, began, costs.client_consume(0)) + job.local_s
            told: Granted = []
            if in_a_row < _IN_A_ROW:
                told = yield from self._own(host)
                in_a_row += bool(told)
            if not told:
                in_a_row = 0
                told = yield from self._gather(host)
            rows = Rows.together([each for _, each in told])
            yield cluster.client(host, self.loop.now + job.local_s, costs.client_consume.each * len(rows) * 1e-6)
            if job.row_bytes:
                yield from self._read(host, rows)
            self.delivered.append((began, self.loop.now, len(rows)))
            yield from self._ack(host, told, rows)

    def _own(self, host: int) -> Process:
        """What the home here gives."""
        left = int(self.homes.ready[host])
        given = self.homes.give(host, self.job.want, self.job.least)
        if given is None:
            yield self.cluster.node(host, self.loop.now, self.costs.front_consume(0), "take")
            return []
        yield self.cluster.node(host, self.loop.now, self._take_cost(len(given), left), "take")
        return [(host, given)]

    def _take_cost(self, rows: int, ready: int) -> float:
        return self.costs.take(rows) + self.costs.shown(max(0, min(ready, WINDOW) - rows))

    def _gather(self, host: int) -> Process:
        job, costs, cluster = self.job, self.costs, self.cluster
        others = cluster.others(host)
        while True:
            looks = costs.gather_look(job.hosts) + cluster.look * job.hosts
            yield cluster.node(host, self.loop.now, looks, "watch")
            yield from self._watch(host, others)
            ready = self.homes.ready.copy()
            if int(ready.sum()) >= job.least:
                told = yield from self._collect(host, ready)
                if told:
                    return told
                continue
            short = -(-(job.least - int(ready.sum())) // job.hosts)
            yield from self._watch(host, others)
            if int(self.homes.ready.sum()) < int(ready.sum()) + short:
                signal, self._numbers = Signal(), self._numbers + 1
                heapq.heappush(self._waiting, (int(ready.sum()) + short, self._numbers, signal))
                yield signal
            half = np.full(len(others), costs.home_watch / 2 * 1e-6)  # nobody waits any more: told to all
            yield from cluster.ask(host, others, costs.ask_watch / 2 * 1e-6, half, "watch")

    def _watch(self, host: int, others: Index) -> Process:
        """All homes say how many rows they would give, the one here too."""
        yield self.cluster.node(host, self.loop.now, self.costs.home_watch * 1e-6, "watch")
        shown = np.minimum(self.homes.ready[others], WINDOW) * self.costs.shown.each
        at_home = (self.costs.home_watch + shown) * 1e-6
        yield from self.cluster.ask(host, others, self.costs.ask_watch * 1e-6, at_home, "watch")

    def _wake(self) -> None:
        total = int(self.homes.ready.sum())
        while self._waiting and self._waiting[0][0] <= total:
            self.loop.raise_signal(heapq.heappop(self._waiting)[2])

    def _collect(self, host: int, ready: Index) -> Process:
        """Grants of enough rows or, where others were faster, none."""
        job, count = self.job, 0
        told: Granted = []
        for home in self._in_order(host, ready):
            if job.want - count < job.group:
                break
            short = job.least - count
            least = short if ready[home] >= short else 1
            given = yield from self._take(host, home, job.want - count, max(1, least))
            if given is None:
                self.lost_races += 1
                if told or ready[home] < job.least:
                    continue
                break
            told.append((home, given))
            count += len(given)
        if told and (count >= job.least or job.want - count < job.group):
            return told
        for home, given in told:
            cost = self.costs.home_ack(len(given))
            yield from self.cluster.ask(host, np.array([home]), self.costs.ask_ack(0), cost, "take")
            self.homes.take_back(home, given)
        self._wake()
        return []

    def _in_order(self, host: int, ready: Index) -> list[int]:
        """The homes that have rows, in the order in which they are to give: all are of one version here."""
        there = np.flatnonzero(ready)
        if (ready >= self.job.least).any():
            first = there[np.argsort(-ready[there], kind="stable")]  # the oldest row, about
            return [host, *first[first != host].tolist()] if ready[host] else first.tolist()
        return there.tolist()  # numbers are the order of nodes: the same for all who ask

    def _take(self, host: int, home: int, want: int, least: int) -> Process:
        left = int(self.homes.ready[home])
        given = self.homes.give(home, want, least)
        rows = len(given) if given is not None else 0
        if home == host:
            cost = self._take_cost(rows, left) if rows else self.costs.front_consume(0)
            yield self.cluster.node(host, self.loop.now, cost, "take")
        else:
            cost = self.costs.home_take(rows) if rows else self.costs.home_watch * 1e-6
            cost += self.costs.shown(max(0, min(left, WINDOW) - rows))
            ask = self.costs.ask_take(rows)
            yield from self.cluster.ask(host, np.array([home]), ask, cost, "take")
        return given

    # payload, and the end

    def _read(self, host: int, rows: Rows) -> Process:
        """The columns of these rows come here from where they are; when the last is there."""
        job, costs, cluster, now = self.job, self.costs, self.cluster, self.loop.now
        done = [now + costs.get_s_gb * len(rows) * job.row_bytes / 1e9]
        owners, counts = np.unique(rows.owner[rows.owner != host], return_counts=True)
        shards = np.unique(rows.shard[rows.owner != host])
        if len(owners):
            each = len(shards) / len(owners)
            cluster.messages["read"] += 2.0 * len(shards) - len(owners)
            send = np.full(len(owners), each * costs.send_shard * 1e-6)
            yield from cluster.ask(host, owners, each * costs.read_shard * 1e-6, send, "read")
            done += [
                cluster.links.bring(int(owner), host, self.loop.now, float(count) * job.row_bytes)
                for owner, count in zip(owners, counts, strict=True)
            ]
        yield max(done)

    def _ack(self, host: int, told: Granted, rows: Rows) -> Process:
        job, costs, cluster = self.job, self.costs, self.cluster
        yield cluster.client(host, self.loop.now, costs.client_ack(len(rows))) + job.local_s
        away = [(home, given) for home, given in told if home != host]
        if len(away) < len(told):
            own = sum(len(given) for home, given in told if home == host)
            yield cluster.node(host, self.loop.now, costs.ack(own), "ack")
        if away:
            homes = np.array([home for home, _ in away])
            at_home = np.array([costs.home_ack(len(given)) for _, given in away])
            yield from cluster.ask(host, homes, costs.ask_ack(0), at_home, "ack")
        yield self._settle(told, self.loop.now)
        self.homes.ack(rows)
        self.loop.raise_signal(self._acked)
        if job.limited:
            self._tell_keeper(np.array([home for home, _ in told]))
        yield self.loop.now + job.local_s

    def _settle(self, told: Granted, when: float) -> float:
        """The homes tell who stores the rows' columns; when all know."""
        pairs: list[Any] = []
        for home, given in told:
            owners, counts = np.unique(given.owner, return_counts=True)
            kept = owners != home
            pairs.append((np.full(int(kept.sum()), home), owners[kept], counts[kept]))
        homes, owners, counts = (np.concatenate(each) for each in zip(*pairs, strict=True))
        if not len(homes):
            return when
        cluster = self.cluster
        cluster.messages["settle"] += len(homes)
        cost = (self.costs.settle.base + self.costs.settle.each * counts.astype(np.float64)) * 5e-7
        said = cluster.each(homes, when, cost + 3 * cluster.look, "settle")
        return cluster.each(owners, said + self.job.latency_s, cost + cluster.look, "settle") + self.job.latency_s
