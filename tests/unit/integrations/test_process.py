from __future__ import annotations

import os

import pytest

from dataplane.integrations import process


def test_a_child_keeps_the_address_of_its_parent_when_it_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An `init()` of TransferQueue that fails closes the plane; a retry has to find the parent's node again."""
    monkeypatch.setenv(process._INHERITED, "/run/of/the/parent")
    process.close()
    assert os.environ[process._INHERITED] == "/run/of/the/parent"
