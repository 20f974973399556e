"""A worker: executes its instructions in order, each as soon as its inputs exist.

A worker stores the output of an instruction over its plane, and sends the executor a reference. It knows its own
outputs without a message. It has no plan, only its own instructions.

Invariants: a worker ends when the executor has gone, and frees the outputs and states of the last steps on its node. No
message is unpickled. An error of a function ends the step of the worker, but not the worker.
"""

from __future__ import annotations

import os
import time
import traceback
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress

from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane, connect
from dataplane.errors import DataplaneError
from dataplane.pipeline import messages as m
from dataplane.pipeline.functions import Functions, WorkerObjects

AHEAD = 2  # instructions whose inputs are fetched from other hosts before their turn


class ExecutorGone(Exception):
    """The executor has gone, or ends the worker. Functions of stages never raise this."""


class ExecutorLink(ABC):
    """The connection of a worker to its executor."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Send a message to the executor. Raises ExecutorGone if it has gone."""

    @abstractmethod
    def receive(self, *, wait: bool) -> bytes | None:
        """The oldest unread message of the executor. Without `wait`, None if there is none. Raises ExecutorGone."""


def work(link: ExecutorLink, address: str, functions: Functions) -> None:
    """Run a worker on the node at this address, until the executor has gone."""
    with connect(address) as plane:
        link.send(m.encode(m.WorkerReady(os.getpid())))
        Worker(link, plane, functions).run()


class Worker:
    """The state of one worker."""

    def __init__(self, link: ExecutorLink, plane: Plane, functions: Functions) -> None:
        self._link = link
        self._plane = plane
        self._node = bytes.fromhex(plane.stats().node)
        self._objects = WorkerObjects(functions, plane)
        self._instructions: dict[int, tuple[str, int, int, list[int]]] = {}
        self._begun: deque[m.Use | m.BeginStep] = deque()
        self._made: dict[int, dict[int, BatchRef | None]] = {}  # by step, by instruction
        self._ended = -1  # the last step that is over here
        lag = functions.pipeline.lag if functions.pipeline else 0
        self._scopes: deque[str] = deque(maxlen=lag + 2)  # of steps in progress, and of the step before, for its states
        self._loaded: dict[int, BatchRef] = {}

    def run(self) -> None:
        """Work until the executor has gone."""
        try:
            while True:
                while not self._begun:
                    self._hear(wait=True)
                begun = self._begun.popleft()
                if isinstance(begun, m.Use):
                    self._use(begun)
                else:
                    self._step(begun)
        except ExecutorGone:
            with suppress(DataplaneError):  # the node has gone
                self._free()

    def _free(self) -> None:
        for scope in self._scopes:
            self._plane.free(scope=scope)
            self._plane.free(scope=m.states_of(scope))
        for state in self._loaded.values():
            self._plane.free(state)

    def _hear(self, *, wait: bool) -> bool:
        encoded = self._link.receive(wait=wait)
        if encoded is None:
            return False
        message = m.to_worker.decode(encoded)
        if isinstance(message, m.Made):
            if message.step > self._ended:
                ref = BatchRef.decode(message.ref) if message.ref else None
                self._made.setdefault(message.step, {})[message.instruction] = ref
        elif isinstance(message, m.Load):
            self._loaded[message.stage] = BatchRef.decode(message.ref)
            self._objects.load(message.stage, self._loaded[message.stage])
        else:
            self._begun.append(message)
        return True

    def _use(self, plan: m.Use) -> None:
        self._instructions = {i: (kind, stage, micro, needs) for i, kind, stage, micro, needs in plan.instructions}
        self._objects.use(plan.micro_batches, plan.bounds)

    def _step(self, begin: m.BeginStep) -> None:
        self._scopes.append(begin.scope)
        made = self._made.setdefault(begin.step, {})
        parts = {micro: BatchRef.decode(ref) for micro, ref in begin.parts.items()}
        stage, asked = -1, -1
        try:
            for at, i in enumerate(begin.order):
                kind, stage, micro, needs = self._instructions[i]
                while not all(need in made for need in needs):
                    self._hear(wait=True)
                while self._hear(wait=False):
                    pass
                asked = self._ask(begin, made, max(asked, at), at + AHEAD)
                began, computing = time.monotonic(), time.process_time()
                columns, worked = self._objects.do(kind, stage, micro, needs, made, parts.get(micro))
                ref = self._plane.put(columns, scope=begin.scope) if columns else None
                made[i] = ref
                computed = time.process_time() - computing
                encoded = b"" if ref is None else ref.encode()
                did = m.Did(begin.step, i, encoded, began, time.monotonic(), worked, computed)
                self._link.send(m.encode(did))
            for stage, columns in self._objects.finish({self._instructions[i][1] for i in begin.order}).items():
                ref = self._plane.put(columns, scope=m.states_of(begin.scope))
                self._link.send(m.encode(m.StepState(begin.step, stage, ref.encode())))
        except ExecutorGone:
            raise
        except Exception:  # a user's function may raise anything
            self._link.send(m.encode(m.Failed(begin.step, stage, traceback.format_exc())))
        self._ended = max(self._ended, begin.step)
        self._made = {step: refs for step, refs in self._made.items() if step > self._ended}
        self._link.send(m.encode(m.Ended(begin.step)))

    def _ask(self, begin: m.BeginStep, made: dict[int, BatchRef | None], after: int, until: int) -> int:
        """Prefetch inputs of the instructions after position `after` up to `until`, as far as they exist. Returns the
        last such position."""
        last = min(until, len(begin.order) - 1)
        for at in range(after + 1, last + 1):
            needs = self._instructions[begin.order[at]][3]
            if not all(need in made for need in needs):
                return at - 1
            for need in needs:
                if (ref := made[need]) is not None and any(node != self._node for node, _ in ref.shards()):
                    self._plane.prefetch(ref)
        return last
