"""The transport over NIXL."""

from __future__ import annotations

import importlib.util

import pytest

from dataplane.transport.channels import Transport
from dataplane.transport.nixl import Nixl
from tests.conformance.transports import TransportSuite

if not any(importlib.util.find_spec(name) for name in ("nixl_cu13", "nixl_cu12", "nixl")):
    pytest.skip("NIXL is not installed: pip install rollout-dataplane[nixl]", allow_module_level=True)


class TestNixl(TransportSuite):
    def made(self) -> Transport:
        return Nixl("127.0.0.1")
