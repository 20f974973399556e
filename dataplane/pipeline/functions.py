"""The functions that a worker executes: stages of a pipeline over micro-batches, or passes of chunks of a model.

The inputs of an instruction are references to the step's rows and to outputs of other instructions. They are combined
without copies, and read in place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dataplane.batch.ref import BatchRef
from dataplane.client.sync import Plane
from dataplane.pipeline import programs
from dataplane.pipeline.stages import Pipeline

Columns = Mapping[str, Any]


class Chunk(Protocol):
    """Consecutive layers of a model, in a worker. Micro-batches are identified by their numbers.

    It may also have `reads`, the names of columns of the step's rows that its forward pass receives too. `finish()`, to
    apply gradients, is called after its worker's last instruction of a step. By `state()`, which returns columns, and
    `load(batch)`, the replacement of a dead worker continues.
    """

    def forward(self, micro: int, batch: Any) -> Columns | None:
        """The columns for the next chunk, from the `Batch` of the previous one (None for the first without `reads`)."""

    def backward_input(self, micro: int, gradient: Any) -> Columns | None:
        """The columns for the previous chunk: gradients of the input, from the `Batch` of the next chunk (None for the
        last)."""

    def backward_weight(self, micro: int) -> None:
        """Add the micro-batch's gradients of the weights to the sums."""


@dataclass(frozen=True, slots=True)
class Functions:
    """The stages of a pipeline, or chunks that `build(first layer, end layer)` creates. Passed to each worker
    unchanged."""

    pipeline: Pipeline | None = None
    build: Callable[[int, int], Chunk] | None = None

    def keeps_state(self, stage: int) -> bool:
        """Whether a stage or chunk depends on its earlier calls. This state is lost when its worker dies."""
        return self.pipeline is None or self.pipeline.stages[stage].stateful


class WorkerObjects:
    """The functions and chunks of one worker, created at their first use."""

    def __init__(self, functions: Functions, plane: Plane) -> None:
        self._functions = functions
        self._plane = plane
        self._objects: dict[int, Any] = {}
        self._states: dict[int, BatchRef] = {}
        self.micro_batches = 1
        self.bounds: list[int] = []

    def use(self, micro_batches: int, bounds: list[int]) -> None:
        """Switch to another plan. Chunks with different layers are created anew."""
        if self.bounds and bounds != self.bounds:
            self._objects, self._states = {}, {}
        self.micro_batches, self.bounds = micro_batches, bounds

    def load(self, stage: int, state: BatchRef) -> None:
        """Set the state with which the stage begins at its first use."""
        self._objects.pop(stage, None)
        self._states[stage] = state

    def do(
        self,
        kind: str,
        stage: int,
        micro: int,
        needs: list[int],
        made: Mapping[int, BatchRef | None],
        part: BatchRef | None,
    ) -> tuple[Columns | None, float]:
        """Execute an instruction. made: outputs of the instructions `needs`; part: the rows of its micro-batch. Returns
        the columns and the seconds of its function."""
        target = self._object(stage)
        if kind == programs.RUN:
            ref = self._inputs(stage, micro, needs, made, part)
        else:
            ref = self._handed(stage, needs, made)
            reads = getattr(target, "reads", ()) if kind == programs.FORWARD else ()
            if reads and part is not None:
                own = part.select(*reads)
                ref = own if ref is None else own.union(ref)
        batch = None if ref is None else self._plane.get(ref)
        began = time.monotonic()
        columns = target(batch) if kind == programs.RUN else _passed(target, kind, micro, batch)
        return columns, time.monotonic() - began

    def finish(self, stages: set[int]) -> dict[int, Columns]:
        """End the step for these stages: apply accumulated gradients. Returns the columns of the state of each."""
        states = {}
        for stage in sorted(stages):
            target = self._object(stage)
            if hasattr(target, "finish"):
                target.finish()
            if self._functions.keeps_state(stage) and hasattr(target, "state"):
                states[stage] = target.state()
        return states

    def _object(self, stage: int) -> Any:
        if stage not in self._objects:
            self._objects[stage] = self._new(stage)
            if stage in self._states:
                self._objects[stage].load(self._plane.get(self._states.pop(stage)))
        return self._objects[stage]

    def _new(self, stage: int) -> Any:
        if self._functions.pipeline is None:
            assert self._functions.build is not None
            return self._functions.build(self.bounds[stage], self.bounds[stage + 1])
        described = self._functions.pipeline.stages[stage]
        assert described.function is not None
        return described.function() if described.factory else described.function

    def _inputs(
        self, stage: int, micro: int, needs: list[int], made: Mapping[int, BatchRef | None], part: BatchRef | None
    ) -> BatchRef | None:
        """The columns that a stage reads of a micro-batch, side by side, from the step's rows and other stages'
        outputs."""
        assert self._functions.pipeline is not None
        wanted = self._functions.pipeline.stages[stage].inputs
        found, left = [], list(wanted)
        for need in needs:
            ref = made[need] if need % self.micro_batches == micro and need // self.micro_batches != stage else None
            if ref is not None and (names := [name for name in left if name in ref.columns]):
                found.append(ref.select(*names))
                left = [name for name in left if name not in names]
        if left and part is not None:
            found.append(part.select(*left))
        whole = None
        for ref in found:
            whole = ref if whole is None else whole.union(ref)
        return whole

    def _handed(self, stage: int, needs: list[int], made: Mapping[int, BatchRef | None]) -> BatchRef | None:
        """The output of the previous chunk or, for a backward pass, of the next one."""
        chunks = len(self.bounds) - 1
        others = [need for need in needs if need // self.micro_batches % chunks != stage]
        return made[others[0]] if others else None


def _passed(chunk: Chunk, kind: str, micro: int, batch: Any) -> Columns | None:
    if kind == programs.FORWARD:
        return chunk.forward(micro, batch)
    if kind == programs.BACKWARD_WEIGHT:
        chunk.backward_weight(micro)
        return None
    gradient = chunk.backward_input(micro, batch)
    if kind == programs.BACKWARD:
        chunk.backward_weight(micro)
    return gradient
