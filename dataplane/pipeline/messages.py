"""What an executor and its workers tell each other. References and numbers alone: no batch goes this way."""

from __future__ import annotations

import msgspec


class Use(msgspec.Struct, frozen=True, tag="use"):
    """The instructions that the worker may be given from now on: number, kind, stage, micro-batch, needs."""

    instructions: list[tuple[int, str, int, int, list[int]]]
    micro_batches: int
    bounds: list[int]


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The state that a stage or chunk begins with."""

    stage: int
    ref: bytes


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """A step: its rows by micro-batch, and the worker's instructions in their order."""

    step: int
    scope: str
    parts: dict[int, bytes]
    order: list[int]


class Made(msgspec.Struct, frozen=True, tag="made"):
    """Another worker has done an instruction; `ref` is what it made, empty for nothing."""

    step: int
    instruction: int
    ref: bytes


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker has connected."""

    pid: int


class Did(msgspec.Struct, frozen=True, tag="did"):
    """The worker has done an instruction. Seconds are of the monotonic clock of its host; `worked` are those of the
    function, `computed` those of a processor in all of the instruction."""

    step: int
    instruction: int
    ref: bytes
    began: float
    ended: float
    worked: float
    computed: float


class Kept(msgspec.Struct, frozen=True, tag="kept"):
    """The state of a stage or chunk after a step."""

    step: int
    stage: int
    ref: bytes


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The worker has come to the end of a step's instructions."""

    step: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A function raised."""

    step: int
    stage: int
    trace: str


ToWorker = Use | Load | Begin | Made
FromWorker = Ready | Did | Kept | Ended | Failed

encode = msgspec.msgpack.Encoder().encode
to_worker = msgspec.msgpack.Decoder(ToWorker)
from_worker = msgspec.msgpack.Decoder(FromWorker)
