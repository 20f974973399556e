"""The transport over UCX."""

from __future__ import annotations

import pytest

from dataplane.transport.channels import Transport
from dataplane.transport.ucx import Ucx
from tests.conformance.transports import TransportSuite

pytest.importorskip("ucxx", reason="ucxx is not installed: pip install rollout-dataplane[ucx]")


class TestUcx(TransportSuite):
    def made(self) -> Transport:
        return Ucx("127.0.0.1")
