"""Runs any plan: sends each worker its instructions, and passes batches by reference over the plane.

The executor runs in the process that creates it. It sends each worker its instructions at the beginning of a step, and
forwards references as outputs appear; rows are not moved. With a lag, up to `lag` steps are in progress beside the
oldest.

Invariants: when `step` returns, all of the step's instructions were executed, each counted once; outputs that the
result does not contain are freed, some of them earlier, once all their consumers are done. A dead worker is replaced.
Its finished instructions count, and the others are executed again; those of a stage with state are all executed again,
from the state after the previous step. A result belongs to the caller, who frees it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType

import numpy as np

from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane, connect
from dataplane.errors import DataplaneError, OutcomeUnknown, OwnerDied, PeerUnavailable
from dataplane.pipeline import messages as m
from dataplane.pipeline.crews import Crew, Processes
from dataplane.pipeline.functions import Chunk, Functions
from dataplane.pipeline.models import Model
from dataplane.pipeline.plans import Plan
from dataplane.pipeline.stages import Pipeline

START_S = 120.0  # seconds for workers to start and connect


class StageFailed(DataplaneError):
    """A function of `stage` raised in `worker`; `trace` is the traceback. The step is aborted."""

    FIELDS = {"stage": "", "worker": -1, "trace": ""}


@dataclass(frozen=True, slots=True)
class Span:
    """The execution of an instruction, from `began` to `ended` seconds after the step's begin. `worked`: seconds in the
    function. `computed`: processor seconds, with reading and storing."""

    worker: int
    instruction: int
    began: float
    ended: float
    worked: float
    computed: float


@dataclass(frozen=True)
class Result:
    """A finished step. ref: the kept columns, in the order of the step's rows; None for no columns.

    step_s: from its beginning to the report of its last instruction. ended: the time of this report, on the monotonic
    clock. replaced: the number of workers that died in it and were replaced.
    """

    number: int
    ref: BatchRef | None
    step_s: float
    ended: float
    spans: tuple[Span, ...]
    replaced: int = 0


@dataclass
class _Step:
    number: int
    plan: Plan
    scope: str
    parts: list[BatchRef]
    began: float
    made: dict[int, bytes] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    left: list[int] = field(default_factory=list)  # by instruction, the consumers that are not done
    running: set[int] = field(default_factory=set)  # workers that are not at their end
    freed: set[int] = field(default_factory=set)
    repeated: list[bytes] = field(default_factory=list)  # outputs of instructions that were done before
    states: dict[int, bytes] = field(default_factory=dict)  # by stage that has ended the step
    ended: float = 0.0
    replaced: int = 0


class Executor:
    """A pipeline, or a model's chunks, on the workers of a plan. A context manager, used by one thread.

    build: for a model, `build(first, end)` returns the chunk of layers first to end - 1. It is called in workers, and
        pickled like the functions of stages.
    keep: the columns of a result; None: those of the stages that no stage follows.
    on: "processes", or "ray". method: how processes are started, "spawn" or "forkserver".
    restarts: the number of workers that may be replaced before it gives up.

    Raises PeerUnavailable if workers do not start, ValueError for invalid arguments.
    """

    def __init__(
        self,
        plane: Plane,
        of: Pipeline | Model,
        plan: Plan,
        *,
        build: Callable[[int, int], Chunk] | None = None,
        keep: Sequence[str] | None = None,
        on: str = "processes",
        method: str = "spawn",
        restarts: int = 3,
    ) -> None:
        if isinstance(of, Model) == (build is None):
            raise ValueError("a model needs `build`, and a pipeline does not")
        self._plane, self._of, self._plan, self._restarts = plane, of, plan, restarts
        self._functions = Functions(of if isinstance(of, Pipeline) else None, build)
        self._lag = of.lag if isinstance(of, Pipeline) else 0
        self._keep = self._kept(keep)
        self._name = uuid.uuid4().hex[:12]
        self._steps: dict[int, _Step] = {}
        self._next = 0
        self._states: dict[int, bytes] = {}  # of each stage, after the last finished step
        self._ready: set[int] = set()
        self._used: dict[int, Plan] = {}
        self._on, self._method = on, method
        self._aborted: list[_Step] = []  # until their workers have ended
        self.crew = _crew(on, self._functions, method)
        self._start()

    def _start(self) -> None:
        self._ready, self._used = set(), {}
        try:
            for w in range(self._plan.cluster.workers):
                self.crew.start(w, self._address(w))
            self._until(lambda: len(self._ready) == self._plan.cluster.workers, START_S)
        except BaseException:
            self.crew.close()
            raise

    def _kept(self, keep: Sequence[str] | None) -> tuple[str, ...]:
        if isinstance(self._of, Model):
            return tuple(keep or ())
        if keep is not None:
            return tuple(keep)
        return tuple(name for s in self._of.last for name in self._of.stages[s].outputs)

    def _address(self, worker: int) -> str:
        own = "ray" if self._on == "ray" else self._plane.address
        return self._plan.cluster.host(worker).address or own

    @property
    def plan(self) -> Plan:
        """The plan of the next step."""
        return self._plan

    @property
    def steps(self) -> int:
        """The number of begun steps."""
        return self._next

    def use(self, plan: Plan) -> None:
        """Use another plan, with the same number of workers, for steps that begin from now on.

        If the new plan splits a model differently, chunks are created again, and the state of the old ones is dropped:
        `build` has to supply the initial state. Otherwise a chunk or stage with state moves with the result of
        `state()` after the last step. Raises ValueError for another number of workers, or if the state of a stage or
        chunk that moves is unknown.
        """
        if plan.cluster.workers != self._plan.cluster.workers:
            raise ValueError(f"the plan has {plan.cluster.workers} workers, not {self._plan.cluster.workers}")
        if plan.bounds != self._plan.bounds:
            self._forget_states()
        else:
            self._move_states(plan)
        self._plan = plan

    def _move_states(self, plan: Plan) -> None:
        """Send the state of each stage that moves to its new workers. Raises ValueError if a state is unknown."""
        moved = [
            s
            for s, workers in plan.workers_of.items()
            if self._functions.keeps_state(s) and self._next and workers != self._plan.workers_of.get(s)
        ]
        for s in moved:
            if s not in self._states or self._steps:
                raise ValueError(f"{self._name_of(s)} keeps state that is not known, and the plan moves it")
        for s in moved:
            for w in plan.workers_of[s]:
                self.crew.send(w, m.encode(m.Load(s, self._states[s])))

    def _name_of(self, stage: int) -> str:
        return self._of.stages[stage].name if isinstance(self._of, Pipeline) and stage >= 0 else f"chunk {stage}"

    def step(self, rows: BatchRef | None = None) -> Result:
        """Execute one step. rows: its rows, with the columns that stages read and no stage produces; None for a model
        whose chunks read no columns. Raises StageFailed if a function raises, PeerUnavailable if over `restarts`
        workers die, ValueError for another number of rows than the plan's, and the plane's errors."""
        (result,) = self.run([rows])
        return result

    def run(self, steps: Iterable[BatchRef | None]) -> Iterator[Result]:
        """Execute steps. Yields their results in order. As many are in progress as the lag allows. Raises the errors of
        `step`."""
        coming = iter(steps)
        first, more = self._next, True
        try:
            while more or self._steps:
                while more and len(self._steps) <= self._lag:
                    try:
                        self._begin(next(coming))
                    except StopIteration:
                        more = False
                if not self._steps:
                    return
                self._until(partial(self._done, self._steps[first]), None)
                result = self._result(self._steps[first])
                del self._steps[first]
                first += 1
                error = None
                if more and len(self._steps) <= self._lag:  # before the caller reads the result
                    try:
                        self._begin(next(coming))
                    except StopIteration:
                        more = False
                    except Exception as raised:  # after the caller has read it
                        error = raised
                yield result
                if error is not None:
                    raise error
        finally:
            aborted = list(self._steps.values())
            self._aborted += aborted
            self._steps.clear()
            for step in aborted:
                self._free(step)
                self._free_refs(step.states.values())

    def close(self) -> None:
        """End the workers, and free the states of stages."""
        self._end_workers()
        self._forget_states()

    def _end_workers(self) -> None:
        self.crew.close()
        _free_scopes(self._plane, self._aborted)
        for address in {host.address for step in self._aborted for host in step.plan.cluster.hosts if host.address}:
            with suppress(DataplaneError), connect(address) as plane:  # its node has gone
                _free_scopes(plane, self._aborted)

    def _forget_states(self) -> None:
        self._free_refs(self._states.values())
        self._states.clear()

    def __enter__(self) -> Executor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # A step

    def _begin(self, rows: BatchRef | None) -> None:
        if self._aborted:
            self._restart_all()
            self._aborted.clear()
        plan, number = self._plan, self._next
        planned = sum(map(len, plan.parts))
        if rows is not None and plan.parts and planned != len(rows):
            raise ValueError(f"the plan is of {planned} rows, and the step has {len(rows)}")
        parts = [] if rows is None else [rows[np.array(part, np.int64)] for part in plan.parts or [range(len(rows))]]
        if plan.bounds and rows is not None:
            parts = rows.chunk(plan.micro_batches)
        step = _Step(number, plan, f"pipeline-{self._name}-{number}", parts, time.monotonic())
        step.left = [0] * len(plan.instructions)
        for each in plan.instructions:
            for need in each.needs:
                step.left[need] += 1
        self._next += 1
        self._steps[number] = step
        for w in range(plan.cluster.workers):
            self._tell(step, w, list(plan.orders[w]))

    def _tell(self, step: _Step, w: int, order: list[int]) -> None:
        """Send a worker its instructions of a step, preceded by the plan if the worker does not have it."""
        if self._used.get(w) is not step.plan:
            self._used[w] = step.plan
            own = [(i, step.plan.instructions[i]) for i in step.plan.orders[w]]
            told = [(i, each.kind, each.stage, each.micro, list(each.needs)) for i, each in own]
            self.crew.send(w, m.encode(m.Use(told, step.plan.micro_batches, list(step.plan.bounds))))
        micros = {step.plan.instructions[i].micro for i in order} if step.parts else set()
        parts = {micro: step.parts[micro].encode() for micro in micros}
        step.running.add(w)
        self.crew.send(w, m.encode(m.BeginStep(step.number, step.scope, parts, order)))

    @staticmethod
    def _done(step: _Step) -> bool:
        return len(step.made) == len(step.plan.instructions) and not step.running

    def _until(self, condition: Callable[[], bool], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not condition():
            if deadline is not None and time.monotonic() > deadline:
                raise PeerUnavailable(f"workers did not answer within {timeout:.0f} s", address=self._plane.address)
            for w, encoded in self.crew.hear(1.0):
                if encoded is None:
                    self._replace(w)
                else:
                    self._hear(w, m.from_worker.decode(encoded))

    def _hear(self, w: int, message: m.FromWorker) -> None:
        if isinstance(message, m.WorkerReady):
            self._ready.add(w)
            return
        step = self._steps.get(message.step)
        if step is None:
            return  # the step was aborted
        if isinstance(message, m.StepState):
            if message.stage in step.states:  # another worker of the stage has sent it
                self._free_refs([step.states[message.stage]])
            step.states[message.stage] = message.ref
        elif isinstance(message, m.Did):
            self._did(step, w, message)
        elif isinstance(message, m.Ended):
            step.running.discard(w)
        else:
            name = self._name_of(message.stage)
            text = f"{name} raised in worker {w}:\n{message.trace}"
            raise StageFailed(text, stage=name, worker=w, trace=message.trace)

    def _did(self, step: _Step, w: int, did: m.Did) -> None:
        i = did.instruction
        if i in step.made:
            step.repeated.append(did.ref)  # it was done before its worker died
            return
        step.made[i] = did.ref
        for other in step.plan.consumers.get(i, ()):
            if other != w:
                self.crew.send(other, m.encode(m.Made(step.number, i, did.ref)))
        step.ended = time.monotonic()
        step.spans.append(Span(w, i, did.began - step.began, did.ended - step.began, did.worked, did.computed))
        for need in step.plan.instructions[i].needs:
            step.left[need] -= 1
            if not step.left[need] and self._free_early(step.plan.instructions[need].stage) and step.made[need]:
                step.freed.add(need)
                self._free_refs([step.made[need]])

    def _free_early(self, stage: int) -> bool:
        """Whether the output of the stage can be freed once its consumers are done, because no consumer may be executed
        again."""
        if not isinstance(self._of, Pipeline):
            return False
        followers = [s for s, needs in enumerate(self._of.needs) if stage in needs]
        kept = set(self._of.stages[stage].outputs) & set(self._keep)
        return not kept and not any(self._of.stages[s].stateful for s in followers)

    def _result(self, step: _Step) -> Result:
        ref = self._kept_columns(step)
        if ref is not None:
            ref = self._plane.retain(ref)
        self._free(step)
        if step.plan.bounds == self._plan.bounds:
            self._free_refs(self._states[stage] for stage in step.states if stage in self._states)
            self._states |= step.states
        else:  # another plan has replaced these chunks
            self._free_refs(step.states.values())
        spans = tuple(sorted(step.spans, key=lambda span: span.began))
        return Result(step.number, ref, step.ended - step.began, step.ended, spans, step.replaced)

    def _free(self, step: _Step) -> None:
        """Free the outputs of a step: on this host by its scope, on others by their references."""
        self._plane.free(scope=step.scope)
        self._free_refs(encoded for i, encoded in step.made.items() if i not in step.freed)
        self._free_refs(step.repeated)

    def _free_refs(self, refs: Iterable[bytes]) -> None:
        for ref in filter(None, refs):
            with suppress(PeerUnavailable, OutcomeUnknown, OwnerDied):  # its host is away: the step is valid without it
                self._plane.free(BatchRef.decode(ref))

    def _kept_columns(self, step: _Step) -> BatchRef | None:
        if not self._keep or not isinstance(self._of, Pipeline):
            return None
        count, whole = step.plan.micro_batches, None
        back = np.argsort(np.concatenate([np.array(part, np.int64) for part in step.plan.parts]))
        for s, stage in enumerate(self._of.stages):
            names = [name for name in stage.outputs if name in self._keep]
            made = [step.made[s * count + micro] for micro in range(count)]
            if names and all(made):
                column = concat([BatchRef.decode(ref).select(*names) for ref in made])[back]
                whole = column if whole is None else whole.union(column)
        return whole

    # Deaths

    def _replace(self, w: int) -> None:
        """Replace a dead worker."""
        self._restarts -= 1
        self._used.pop(w, None)
        if self._restarts < 0:
            raise PeerUnavailable(f"worker {w} died, and no more are replaced", address=self._plane.address)
        self.crew.start(w, self._address(w))
        states = dict(self._states)
        for step in self._steps.values():
            if step.plan.bounds == self._plan.bounds:
                states |= step.states
        for stage, ref in states.items():
            if w in self._plan.workers_of.get(stage, ()):
                self.crew.send(w, m.encode(m.Load(stage, ref)))
        for step in self._steps.values():
            self._tell_again(step, w)

    def _tell_again(self, step: _Step, w: int) -> None:
        """Send a new worker the rest of a step, and the outputs that it needs."""
        instructions = step.plan.instructions

        def again(i: int) -> bool:
            stage = instructions[i].stage
            lost = self._functions.keeps_state(stage) and stage not in step.states
            return lost or i not in step.made

        order = [i for i in step.plan.orders[w] if again(i)]
        step.replaced += 1
        step.running.discard(w)
        if not order:
            return
        doing = set(order)
        self._tell(step, w, order)
        for need in sorted({n for i in order for n in instructions[i].needs} - doing):
            if need in step.made:
                self.crew.send(w, m.encode(m.Made(step.number, need, step.made[need])))

    def _restart_all(self) -> None:
        """Replace all workers after aborted steps."""
        states = [BatchRef.decode(ref) for ref in self._states.values()]
        kept = dict(zip(self._states, [self._plane.retain(ref).encode() for ref in states], strict=True))
        self._forget_states()  # workers free the states that they stored
        self._states = kept
        self._end_workers()
        self.crew = _crew(self._on, self._functions, self._method)
        self._start()
        for stage, ref in self._states.items():
            for w in self._plan.workers_of.get(stage, ()):
                self.crew.send(w, m.encode(m.Load(stage, ref)))


def _free_scopes(plane: Plane, steps: Sequence[_Step]) -> None:
    """Free all outputs and states that workers on a node have stored in these steps."""
    for step in steps:
        plane.free(scope=step.scope)
        plane.free(scope=m.states_of(step.scope))


def _crew(on: str, functions: Functions, method: str) -> Crew:
    if on == "processes":
        return Processes(functions, method)
    if on != "ray":
        raise ValueError(f'workers are on "processes" or "ray", not {on!r}')
    from dataplane.pipeline.ray_workers import Actors

    return Actors(functions)
