"""Who is admitted to append, and what a ticket is worth."""

from __future__ import annotations

import pytest

from dataplane.errors import LimitExceeded
from dataplane.stream.admission import Admission, AppendSize, Usage
from dataplane.stream.settings import StreamSettings


class Gate:
    """The admission to a stream of which the test says what it holds."""

    def __init__(self, **limits: int) -> None:
        self.held = Usage(0, 0, None)
        self.admission = Admission(StreamSettings(("actor",), **limits), lambda: self.held)

    def ask(self, rows: int, *, nbytes: int = 0, version: int = 0, client: str = "p") -> int | None:
        return self.admission.admit(AppendSize(client, rows, nbytes, version))


def test_an_admission_that_can_never_fit_is_refused() -> None:
    gate = Gate(max_rows=4, max_bytes=100)
    for rows, nbytes, what in ((5, 0, "rows of a stream"), (1, 101, "bytes of a stream")):
        with pytest.raises(LimitExceeded) as refused:
            gate.ask(rows, nbytes=nbytes)
        assert (refused.value.what, refused.value.limit) == (what, 4 if rows == 5 else 100)


def test_clients_with_unused_permits_are_named() -> None:
    gate = Gate()
    tickets = [gate.ask(1, client=client, nbytes=nbytes) for client, nbytes in (("p", 8), ("q", 16), ("p", 8))]
    assert gate.admission.coming() == {"p": 16, "q": 16}
    gate.admission.give_back(tickets[1] or 0)
    assert gate.admission.coming() == {"p": 16}
