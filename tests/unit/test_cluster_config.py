"""How a node is one of several: what is refused before anything listens."""

from __future__ import annotations

from typing import Any

import pytest

from dataplane.config import ClusterConfig
from tests.cases import each_case


@each_case(
    ("listen", "host"),
    [
        ("tcp://127.0.0.1:7000", "127.0.0.1"),
        ("tcp://127.9.9.9:0", "127.9.9.9"),
        ("tcp://[::1]:7000", "::1"),
        ("tcp://localhost:7000", "localhost"),
    ],
)
def test_loopback_needs_no_key(listen: str, host: str) -> None:
    assert ClusterConfig(listen, "etcd://127.0.0.1:1").host == host


BEYOND = [
    "tcp://10.0.0.1:7000", "tcp://0.0.0.0:7000", "tcp://*:7000", "tcp://[::]:7000", "tcp://[fe80::1]:7000",
    "tcp://[::ffff:10.0.0.1]:7000", "tcp://host.example:7000", "tcp://localhost.example:7000",
    "tcp://128.0.0.1:7000", "tcp://127.0.0.1.example:7000", "tcp://0177.0.0.1:7000", "tcp://127.1:7000",
    "tcp://eth0:7000",
]  # fmt: skip


@each_case("listen", BEYOND)
def test_a_listen_address_beyond_loopback_requires_a_key(listen: str) -> None:
    with pytest.raises(ValueError, match="a key is needed"):
        ClusterConfig(listen, advertise="127.0.0.1")


@each_case(
    "listen",
    [
        "", "127.0.0.1:7000", "udp://127.0.0.1:7000", "TCP://127.0.0.1:7000", "tcp://", "tcp://127.0.0.1",
        "tcp://127.0.0.1:", "tcp://:7000", "tcp://127.0.0.1:x", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:７０００", "tcp://127.0.0.1:7000/", "tcp://[]:7000", "ipc:///tmp/x",
    ],
)  # fmt: skip
def test_invalid_listen_addresses_are_refused(listen: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT"):
        ClusterConfig(listen, key="cluster.key")


@each_case(
    ("settings", "said"),
    [
        ({"seeds": "a,b"}, "1, 3 or 5"),
        ({"seeds": "a,b,a:2379"}, "1, 3 or 5"),
        ({"seeds": "a,,b"}, "HOST:PORT"),
        ({"seeds": "a:0"}, "HOST:PORT"),
        ({"seeds": "a:65535"}, "next port"),
        ({"seeds": "a/x y"}, "name"),
        ({"seeds": "a", "join": "etcd://a:1"}, "without --join"),
        ({"seeds": "a", "key": None}, "goes with --key"),
        ({"seed_dir": "/x"}, "goes with --seeds"),
        ({"seeds": "a", "etcd_ca": "ca"}, "joined by etcd"),
        ({}, "by --seeds HOST"),
        ({"join": "etcd://a:1", "etcd_login": "f"}, "over TLS alone"),
        ({"join": "etcd://a:1", "etcd_cert": "f"}, "over TLS alone"),
    ],
)
def test_invalid_seeds_and_credentials_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ClusterConfig("tcp://127.0.0.1:0", **{"key": "k", **settings})


@each_case(
    "join",
    [
        "10.0.0.1:7000", "tcp://10.0.0.1:7000", "etcd//10.0.0.1:7000", "://10.0.0.1:7000",
        "static://10.0.0.1:7000", "etcd:10.0.0.1:2379", "etcd://10.0.0.1", "etcd://10.0.0.1:0",
        "etcd://user@10.0.0.1:2379", "etcd://http://10.0.0.1:2379", "etcd://", "etcd:///name",
        "ETCD://10.0.0.1:2379",
    ],
)  # fmt: skip
def test_invalid_join_addresses_are_refused(join: str) -> None:
    """Found before anything is started: ZeroMQ would refuse some of them in the middle of the node's work."""
    with pytest.raises(ValueError, match="HOST:PORT"):
        ClusterConfig("tcp://127.0.0.1:0", join)
