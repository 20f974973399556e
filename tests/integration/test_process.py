"""`dataplane.integrations.process`: one plane a process."""

import os
from collections.abc import Iterator

import pytest

import dataplane as dp
from dataplane.integrations import process


@pytest.fixture(autouse=True)
def _let_go() -> Iterator[None]:
    process.close()
    yield
    process.close()


@pytest.mark.leaks(reason="a node of this process ends a moment after its last client")
def test_a_forked_child_connects_a_plane_separately() -> None:
    plane = process.start(dp.NodeConfig(memory="32MiB", spill=0))
    ref = plane.put({"a": [1, 2]})
    if (child := os.fork()) == 0:
        os._exit(0 if process.plane().get(ref)["a"].to_list() == [1, 2] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert plane.get(ref)["a"].to_list() == [1, 2]


@pytest.mark.leaks(reason="a node of this process ends a moment after its last client")
def test_a_closed_process_plane_is_connected_again() -> None:
    plane = process.start(dp.NodeConfig(memory="32MiB", spill=0))
    process.close()
    process.close()
    assert process.start(dp.NodeConfig(memory="32MiB", spill=0)) is not plane
