"""Commands that can't be done change nothing, whatever is wrong with them."""

from __future__ import annotations

import numpy as np

from dataplane.batch.field import Field
from dataplane.batch.locations import ref_to
from dataplane.errors import DataplaneError
from dataplane.stream import commands as c
from dataplane.stream import requests as r
from dataplane.stream.machine import StreamMachine
from dataplane.stream.settings import StreamSettings

_INT = Field("dense", "int64", ())


def test_an_extend_with_too_few_lengths_is_refused_and_changes_nothing() -> None:
    machine = StreamMachine("s", StreamSettings(("t",)))
    ref = ref_to(b"n" * 8, 2, [("x", _INT, 16, 1, 0)])
    append = c.AppendCommand(ref=ref, versions=np.zeros(2, np.int64), time_s=0.0)
    append.client, append.sequence = "n/1/1", 1
    assert isinstance(r.decode_result(machine.apply(c.encode(append))), r.AppendResult)
    before = machine.snapshot()
    more = ref_to(b"n" * 8, 2, [("y", _INT, 16, 2, 0)])
    extend = c.ExtendCommand(
        rows=np.arange(2), ref=more, lengths={"y": np.ones(1, np.int64)}, holds=np.empty(0, np.int64)
    )
    try:
        machine.apply(c.encode(extend))
    except (DataplaneError, IndexError):
        pass
    assert machine.snapshot() == before
