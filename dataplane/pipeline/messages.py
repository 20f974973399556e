"""The messages between an executor and its workers: references and numbers only, no batches."""

from __future__ import annotations

import msgspec


class Use(msgspec.Struct, frozen=True, tag="use"):
    """The worker's instructions in steps that begin after this message: number, kind, stage, micro-batch, needs."""

    instructions: list[tuple[int, str, int, int, list[int]]]
    micro_batches: int
    bounds: list[int]


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The initial state of a stage or chunk."""

    stage: int
    ref: bytes


class BeginStep(msgspec.Struct, frozen=True, tag="begin"):
    """The beginning of a step: its rows by micro-batch, and the worker's instructions in order."""

    step: int
    scope: str
    parts: dict[int, bytes]
    order: list[int]


class Made(msgspec.Struct, frozen=True, tag="made"):
    """Another worker has executed an instruction; `ref`: its output, empty for none."""

    step: int
    instruction: int
    ref: bytes


class WorkerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has connected."""

    pid: int


class Did(msgspec.Struct, frozen=True, tag="did"):
    """The worker has executed an instruction. `began`, `ended`: seconds of its host's monotonic clock; `worked`: in the
    function; `computed`: of a processor, in all; `ref`: the output, empty for none."""

    step: int
    instruction: int
    ref: bytes
    began: float
    ended: float
    worked: float
    computed: float


class StepState(msgspec.Struct, frozen=True, tag="kept"):
    """The state of a stage or chunk after a step."""

    step: int
    stage: int
    ref: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The worker has executed all instructions of a step."""

    step: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A function raised."""

    step: int
    stage: int
    trace: str


def states_of(scope: str) -> str:
    """The scope of the states after a step. `scope`: the scope of the step's outputs."""
    return f"{scope}-states"


ToWorker = Use | Load | BeginStep | Made
FromWorker = WorkerReady | Did | StepState | Ended | Failed

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
