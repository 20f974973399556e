"""Measures one system on workloads: two producers put, and two consumers get and read every byte.

Invariants: consumer i gets part i of each producer's rows. All producers put at the same time, and afterwards all
consumers get at the same time. Seconds are from the first begin to the last end. Checksums of read and generated rows
are compared. Memory is sampled in the first cycle, which warms up and is not timed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.peers.children import Child, Failed, cpu_seconds, sampled
from bench.peers.workloads import CONSUMERS, PRODUCERS, Workload


class Cycle:
    """The processes of a measurement: a server, producers and consumers. A context manager that starts and ends
    them."""

    def __init__(self, system: str, python: Path, env: dict[str, str], scratch: Path, largest: int) -> None:
        self._start = (python, system, env)
        self._scratch, self._largest = scratch, largest
        self._all: list[Child] = []
        self._puts = 0
        self.versions: dict[str, str] = {}

    def __enter__(self) -> Cycle:
        try:
            self._server = self._child("server", {"nbytes": self._largest, "scratch": str(self._scratch)})
            said = self._server.answer()
            self._server.also(said["address"].pop("pids", []))
            self.versions = said["versions"]
            self._producers = [self._child("producer", said["address"]) for _ in range(PRODUCERS)]
            self._consumers = [self._child("consumer", said["address"]) for _ in range(CONSUMERS)]
            for child in (*self._producers, *self._consumers):
                child.answer()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._all):
            child.end()

    def _child(self, kind: str, first: Any) -> Child:
        python, system, env = self._start
        log = self._scratch / f"{kind}{len(self._all)}.log"
        self._all.append(Child(python, kind, system, env, log, first))
        return self._all[-1]

    def measure(self, workload: Workload, runs: int) -> dict[str, Any]:
        """Measure a workload in `runs` cycles. Returns seconds of put, get, both, and with every byte read, processor
        seconds, and memory. Raises `Failed`."""
        shares = [asdict(share) for share in workload.shares]
        made = _each(
            self._producers,
            [
                {"do": "make", "share": share, "seed": seed, "parts": CONSUMERS, "ranks": workload.ranks}
                for seed, share in enumerate(shares)
            ],
        )
        digests = [answer["digests"] for answer in made]
        tree = [process for child in self._all for process in child.tree()]
        with sampled(lambda: tree) as samples:
            self._once(workload, digests)
        cycles = [self._once(workload, digests) for _ in range(runs)]
        used = [sample[1] for sample in samples]
        return {name: [cycle[name] for cycle in cycles] for name in cycles[0]} | {
            "nbytes": workload.nbytes,
            "moved_bytes": workload.nbytes * workload.reads,
            "idle_bytes": used[0],
            "peak_bytes": max(used),
            "memory": samples[:: max(1, len(samples) // 200)],
        }

    def _once(self, workload: Workload, digests: list[list[str]]) -> dict[str, float]:
        self._puts += 1
        server = cpu_seconds(self._server.tree())
        name = f"step{self._puts}"
        parts = 1 if workload.ranks else CONSUMERS
        put = _each(self._producers, [{"do": "put", "name": f"{name}p{i}", "parts": parts} for i in range(PRODUCERS)])
        tokens = [answer["tokens"] for answer in put]
        put_s, get_s, read_s = _seconds(put), 0.0, 0.0
        cpu_s, read_cpu_s = _cpu(put), 0.0
        for _ in range(workload.reads):
            got = _each(self._consumers, [_get(tokens, i, ranks=workload.ranks) for i in range(CONSUMERS)])
            read = _each(self._consumers, [{"do": "read"}] * CONSUMERS)
            for i, answer in enumerate(read):
                if answer["digests"] != [digest[i] for digest in digests]:
                    raise Failed("what arrived is not what was sent: the checksums differ")
            get_s, read_s = get_s + _seconds(got), read_s + _seconds(read)
            cpu_s, read_cpu_s = cpu_s + _cpu(got), read_cpu_s + _cpu(read)
        cpu_s += cpu_seconds(self._server.tree()) - server
        _each(self._producers, [{"do": "drop", "tokens": t} for t in tokens])
        return {
            "put_s": put_s, "get_s": get_s, "step_s": put_s + get_s, "read_s": put_s + get_s + read_s,
            "cpu_s": cpu_s, "read_cpu_s": cpu_s + read_cpu_s,
        }  # fmt: skip


def _get(tokens: list[Any], consumer: int, *, ranks: bool) -> dict[str, Any]:
    rank = [consumer, CONSUMERS] if ranks else []
    return {"do": "get", "tokens": [of[0 if ranks else consumer] for of in tokens], "rank": rank}


def _each(children: Sequence[Child], asked: Sequence[Any]) -> list[dict[str, Any]]:
    for child, what in zip(children, asked, strict=True):
        child.tell(what)
    return [child.answer() for child in children]


def _seconds(answers: Sequence[dict[str, Any]]) -> float:
    return float(max(a["ended"] for a in answers) - min(a["began"] for a in answers))


def _cpu(answers: Sequence[dict[str, Any]]) -> float:
    return float(sum(a["cpu_s"] for a in answers))


def summary(measured: dict[str, Any]) -> str:
    """The medians as one line."""
    gb = measured["moved_bytes"] / 1e9
    return (
        f"put {median(measured['put_s']):.4f} s, get {median(measured['get_s']):.4f} s, and all read"
        f" {median(measured['read_s']):.4f} s; {median(measured['cpu_s']) / gb:.2f} processor s a GB;"
        f" peak {measured['peak_bytes'] / 2**20:,.0f} MiB"
    )
