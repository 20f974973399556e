"""Tests with CUDA devices, which `make test-gpu` runs with all that are marked `gpu`; elsewhere they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from tests.processes import StandingNode


def cuda(devices: int = 1, timeout: float = 120) -> list[Any]:
    import torch

    return [
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < devices, reason="there are too few GPUs here"),
        pytest.mark.leaks(reason="a CUDA context keeps threads and descriptors for as long as the process lives"),
        pytest.mark.timeout(timeout),
    ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StandingNode]:
    with StandingNode(tmp_path / "node", memory="512MiB") as standing:
        yield standing


@pytest.fixture
def plane(node: StandingNode) -> Iterator[dp.Plane]:
    with dp.connect(node.address) as connected:
        yield connected
