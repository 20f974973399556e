from __future__ import annotations

from dataplane.observe.status import status_text
from tests.unit.observe.figures import stats, stream


def test_control_characters_in_stream_names_are_escaped() -> None:
    text = status_text(stats(streams={"\x1b[2Jname\n": stream()}))
    assert "?[2Jname?: 1,500" in text
    assert text.replace("\n", "").isprintable()
