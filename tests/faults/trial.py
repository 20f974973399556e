"""What is done to a node while its calls fail, and what must be true of it then and afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from errno import EAGAIN, EINTR

import numpy as np

import dataplane as dp
from tests.faults.cells import OCCURRENCES, Cell
from tests.faults.shim import EVERY
from tests.faults.subject import Subject
from tests.processes import pattern

SHARD = 512 << 10
SHARDS = 12  # of which 8 fit into memory
_WAIT_S = 0.25  # of who asks while calls fail
_RECOVER_S = 60.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened: how many calls there were and were failed, and what the caller was told."""

    cell: Cell
    seen: int
    failed: int
    told: tuple[str, ...]
    seconds: float


class Trial:
    """A node, a neighbour who wants nothing of what fails, and the figures to which the node must come back."""

    def __init__(self, node: Subject, *, fresh: bool = False) -> None:
        """`fresh`: the node has done nothing yet when its calls begin to fail, so that there are no figures."""
        self._node = node
        self._neighbour = dp.connect(node.address)
        self._logged = 0
        self._left: list[dp.BatchRef] = []
        self._held: dict[str, int] | None = None
        if not fresh:
            self._keep()
            for _ in range(2):
                assert self._ask(10.0) == ()
            self._settled()
            self._held = node.held()
            self._descriptors = node.descriptors()

    def _keep(self) -> None:
        self._kept = self._neighbour.put({"x": pattern(77, 4096)})
        self._view = self._neighbour.get(self._kept)["x"].numpy()  # pinned: in memory whatever happens

    def close(self) -> None:
        self._view = None
        self._neighbour.close()

    def run(self, cell: Cell) -> Outcome:
        """Raises AssertionError where the node does not do what it must."""
        began = time.monotonic()
        rule, node = self._node.rule, self._node
        first, count = OCCURRENCES[cell.occurrence]
        if count == EVERY and cell.error in (EINTR, EAGAIN):
            count = 5  # such a call is made again at once, for as long as it is interrupted
        rule.arm(cell.call, cell.error, first=first, count=count, target=cell.target)
        try:
            told = self._ask(_WAIT_S)
            if cell.disk:
                self._others_go_on(cell)
        finally:
            seen, failed = rule.seen, rule.failed
            rule.disarm()
        assert node.alive, f"{cell}: the node ended\n{node.logged()[-3000:]}"
        self._recovers(cell)
        log = node.logged()
        news, self._logged = log[self._logged :], len(log)
        assert "Traceback" not in news, f"{cell}: nobody expected that\n{news[-3000:]}"
        return Outcome(cell, seen, failed, told, time.monotonic() - began)

    def _ask(self, timeout_s: float) -> tuple[str, ...]:
        """Connect, put more than there is memory for, read it back, free it, and leave; the types of errors."""
        told: list[str] = []

        def asked(what: Callable[[], object]) -> bool:
            try:
                what()
            except dp.DataplaneError as error:
                assert "the node failed on this request" not in str(error), str(error)
                told.append(type(error).__name__)
                return False
            return True

        refs: list[dp.BatchRef] = []
        planes: list[dp.Plane] = []

        def read(seed: int, ref: dp.BatchRef) -> None:
            assert np.array_equal(planes[0].get(ref, timeout=timeout_s)["x"].numpy(), pattern(seed, SHARD))

        if not asked(lambda: planes.append(dp.connect(self._node.address))):
            return tuple(told)
        try:
            for seed in range(SHARDS):
                if not asked(
                    lambda seed=seed: refs.append(planes[0].put({"x": pattern(seed, SHARD)}, timeout=timeout_s))
                ):
                    break
            for seed, ref in enumerate(refs):
                if not asked(lambda seed=seed, ref=ref: read(seed, ref)) and told[-1] == "PeerUnavailable":
                    break
        finally:
            self._left = [ref for ref in refs if not asked(lambda ref=ref: planes[0].free(ref))]
            planes[0].close()
        return tuple(told)

    def _others_go_on(self, cell: Cell) -> None:
        """What is in memory is read, and what is small is put, while the disk fails."""
        with suppress(dp.Backpressure):  # all the memory may be somebody's whose shards can not be spilled
            self._neighbour.free(self._neighbour.put({"x": pattern(3, 4096)}, timeout=1.0))
        self._neighbour.stats()
        got = self._neighbour.get(self._kept, timeout=60)["x"].numpy()
        assert np.array_equal(got, pattern(77, 4096))

    def _recovers(self, cell: Cell) -> None:
        """It works again, for a new client and for the neighbour; nothing is left of what failed."""
        if cell.fresh:
            self._keep()
        assert np.array_equal(self._neighbour.get(self._kept, timeout=60)["x"].numpy(), pattern(77, 4096))
        for ref in self._left:
            self._neighbour.free(ref)
        deadline = time.monotonic() + _RECOVER_S
        while told := self._ask(3.0):
            assert time.monotonic() < deadline, f"{cell}: it does not recover: {told} {self._neighbour.stats()}"
        for ref in self._left:
            self._neighbour.free(ref)
        self._settled(cell)
        while self._held is not None:
            held = self._node.held()
            if all(held[kind] <= self._held[kind] for kind in held):
                return
            more = self._node.descriptors() - self._descriptors
            assert time.monotonic() < deadline, f"{cell}: left behind: {held}, before {self._held}: {more}"
            time.sleep(0.002)

    def _settled(self, cell: Cell | None = None) -> None:
        """Waits until all that was put but the neighbour's own has gone."""
        deadline = time.monotonic() + _RECOVER_S
        while True:
            now = self._neighbour.stats()
            if (now.shards, now.disk_used, now.clients, now.reserved_bytes) == (1, 0, 1, 0) and not self._node.files():
                return
            assert time.monotonic() < deadline, f"{cell}: left behind: {now} {self._node.files()}"
            time.sleep(0.002)
