"""Who waits for whom, and for what."""

from __future__ import annotations

from dataplane.web.samples import sample
from dataplane.web.waits import WebWait, WebWaits
from tests.unit.web.looking import A, B, looked, stats


def waits_at(at_s: float, waits: WebWaits, **changed: object) -> list[WebWait]:
    return waits.took(sample(looked(at_s, stats(A, **changed), stats(B)), None))


def test_a_request_that_waits_for_memory_names_the_holder() -> None:
    holders = ({"holder": "train.py (pid 31)", "bytes": 1 << 20, "how": "pinned"},)
    [wait] = waits_at(0.0, WebWaits(), waiting=2, waiting_bytes=4096, holders=holders)
    assert wait.whom == "train.py (pid 31) (1.0 MiB pinned)"
    assert wait.what == "4.0 KiB of memory on a:1"
