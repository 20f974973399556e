"""Chooses the transports of a node, and the one to read from a peer.

By default a node has tcp, and before it those that would use RDMA here: nixl, whose wheel contains it, if there is a
device; ucx if there is one and the UCX that `ucxx` found was built with it. Without RDMA neither is faster than plain
sockets between hosts, so neither is used by default. A node with configured transports has only those, in that order.

Invariant: a read is tried with every transport that both sides have, within its time limit; a transport whose last few
reads failed is tried last. So a failing transport costs time, but fails no read while another works.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataplane.clock import Clock, monotonic
from dataplane.transport.channels import Transport

log = logging.getLogger(__name__)

_DEVICES = Path("/sys/class/infiniband")
_FAILURES = 3  # in a row, after which a transport is put aside for a node
_ASIDE_S = 60.0
_REMEMBERED = 4096  # the most pairs of node and transport with a record


def _tcp(host: str, told: str) -> Transport:
    from dataplane.transport.tcp import Tcp

    return Tcp(host, told)


def _ucx(host: str, told: str) -> Transport:
    from dataplane.transport.ucx import Ucx

    return Ucx(host, told)


def _nixl(host: str, told: str) -> Transport:
    from dataplane.transport.nixl import Nixl

    return Nixl(host, told)


MAKERS: Mapping[str, Callable[[str, str], Transport]] = {"tcp": _tcp, "ucx": _ucx, "nixl": _nixl}
"""Every transport, by its name."""


def has_rdma(devices: Path = _DEVICES) -> bool:
    try:
        return any(devices.iterdir())
    except OSError:
        return False


def automatic() -> list[str]:
    """The names of the transports that suit this host, the best first."""
    if not has_rdma():
        return ["tcp"]
    names = ["nixl"] if any(map(importlib.util.find_spec, ("nixl_cu13", "nixl_cu12", "nixl"))) else []
    if importlib.util.find_spec("ucxx"):
        from dataplane.transport.ucx import carries_rdma

        names += ["ucx"] if carries_rdma() else []
    return [*names, "tcp"]


async def started(names: Sequence[str], host: str, told: str = "") -> list[Transport]:
    """The started transports with these names, or those that suit this host, the best first. `told`: the address for
    others, if it differs. A named transport that does not start raises OSError; without names it is left out."""
    ready: list[Transport] = []
    try:
        for name in names or automatic():
            transport = MAKERS[name](host, told)
            try:
                await transport.start()
            except OSError as error:
                await transport.aclose()
                if names or name == "tcp":
                    raise
                log.warning("transport %s is not available: %s", name, error)
                continue
            except BaseException:
                await transport.aclose()
                raise
            ready.append(transport)
    except BaseException:
        for transport in ready:
            await transport.aclose()
        raise
    return ready


@dataclass(slots=True)
class _Record:
    failures: int = 0
    aside_until: float = 0.0


class TransportChoice:
    """Chooses the transport to read from each peer, by earlier success. Used from one event loop."""

    def __init__(self, transports: Sequence[Transport], clock: Clock = monotonic) -> None:
        """`transports`: those of this node, the best first."""
        self._transports = transports
        self._clock = clock
        self._records: dict[tuple[bytes, str], _Record] = {}
        self._read_bytes = {transport.name: 0 for transport in transports}

    def of(self, node: bytes, addresses: Mapping[str, str]) -> list[Transport]:
        """The transports that this node and another, with these addresses, both have, in the order to be tried."""
        now = self._clock()
        known = [transport for transport in self._transports if transport.name in addresses]
        return sorted(known, key=lambda each: self._record(node, each).aside_until > now)

    def worked(self, node: bytes, transport: Transport, nbytes: int) -> None:
        """Record that this transport has read this number of bytes from the node."""
        self._read_bytes[transport.name] += nbytes
        self._records.pop((node, transport.name), None)

    def failed(self, node: bytes, transport: Transport, error: Exception) -> None:
        """Record that a read by this transport has failed."""
        record = self._record(node, transport)
        record.failures += 1
        log.warning("reading from node %s by %s failed: %s", node.hex(), transport.name, error)
        if record.failures >= _FAILURES and len(self._transports) > 1:
            record.aside_until = self._clock() + _ASIDE_S
            text = "%s has failed %d times in a row for node %s: others are tried before it, for %.0f s"
            log.warning(text, transport.name, record.failures, node.hex(), _ASIDE_S)
        self._records[node, transport.name] = record
        while len(self._records) > _REMEMBERED:
            del self._records[next(iter(self._records))]

    def _record(self, node: bytes, transport: Transport) -> _Record:
        return self._records.get((node, transport.name)) or _Record()

    def statistics(self) -> dict[str, int]:
        return dict(self._read_bytes)
