"""The library that fails calls, made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import etcd
from tests.faults.shim import build, compiler


@pytest.fixture(scope="session", autouse=True)
def _etcd() -> Iterator[None]:
    with etcd.shared():
        yield


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if compiler() is None:
        pytest.skip("there is no C compiler to make the library that fails calls")
    return build(tmp_path_factory.mktemp("shim"))
