"""Connects a process to a node of this host: by address, by the environment, or by starting a node."""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from dataplane.client import embedded
from dataplane.client.connection import Connection, Soon
from dataplane.client.consuming import Beginning
from dataplane.client.plane import GPU_BUDGET, AsyncPlane
from dataplane.config import NodeConfig, parse_size
from dataplane.errors import Misuse, PeerUnavailable

log = logging.getLogger(__name__)


class Connecting(Beginning[AsyncPlane]):
    """A plane that is being connected: `await` it, or enter it by `async with`. `writes`: whether it may write. `soon`:
    as for `Connection.open`."""

    def __init__(
        self,
        address: str | None,
        config: NodeConfig | None,
        *,
        writes: bool = True,
        soon: Soon | None = None,
        gpu_budget: int | str | None = None,
        name: str | None = None,
    ) -> None:
        if config is not None and not isinstance(config, NodeConfig):
            raise Misuse(f"the settings of a node are a NodeConfig, not {type(config).__name__}")
        self._gpu_budget = GPU_BUDGET if gpu_budget is None else parse_size(gpu_budget, "gpu_budget")
        self._address = address
        self._config = config
        self._open = partial(Connection.open, writes=writes, name=name)
        self._soon = soon

    async def _make(self) -> AsyncPlane:
        soon = self._soon or asyncio.get_running_loop().call_soon_threadsafe
        address, node = str(self._address), None
        if self._address is None:
            address, node = await self._found_or_started()
        if address in _DOORS:
            return self._kind()(await self._through(address, soon), None, self._gpu_budget)
        try:
            opened = await self._opened(address, soon, started=node is not None)
            return self._kind()(opened, node, self._gpu_budget)
        except BaseException:
            if node is not None:
                await node.retire()
            raise

    async def _found_or_started(self) -> tuple[str, embedded.EmbeddedNode | None]:
        """Call `embedded.find_or_start` in a thread. If this is cancelled, a node that the thread starts is ended."""
        threads = ThreadPoolExecutor(1, "dataplane-starter")
        starting = threads.submit(embedded.find_or_start, self._config)
        threads.shutdown(wait=False)
        try:
            return await asyncio.wrap_future(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_abandon)
            raise

    async def _opened(self, address: str, soon: Soon, *, started: bool) -> Connection:
        """Connect to the node at the address. `started`: whether this call has started the node."""
        try:
            opened = await self._open(address, soon)
        except PeerUnavailable as error:
            if started:
                raise
            if self._address is not None and self._config is None:
                hint = "`dataplane node` starts one there; connect() without an address starts one for this process"
            elif self._address is not None:
                hint = "config= starts no node where an address is given: leave the address out for one"
            else:
                with_these = "" if self._config is None else " with the settings config="
                hint = f"$DATAPLANE_ADDRESS names it: unset that, and connect() starts a node{with_these}"
            raise PeerUnavailable(f"{error}; {hint}", **error.fields) from None
        if self._config is not None and not started:
            log.warning("the node at %s was started by others and keeps its own settings: config is not used", address)
        return opened

    def _kind(self) -> type[AsyncPlane]:
        """The class of the plane. Its calls make spans if this process has imported OpenTelemetry."""
        if "opentelemetry.trace" not in sys.modules:
            return AsyncPlane
        from dataplane.client.traced import TracedAsyncPlane  # of a higher layer

        return TracedAsyncPlane

    async def _through(self, system: str, soon: Soon) -> Connection:
        """Connect to the node that another system, such as Ray, names. If that node has just died, and the system may
        not know it yet, connect to the next node that it names."""
        address = await asyncio.to_thread(_resolved, system, self._config)
        try:
            return await self._open(address, soon)
        except PeerUnavailable:
            address = await asyncio.to_thread(_resolved, system, None, address)
            return await self._open(address, soon)


def connect(
    address: str | None = None,
    *,
    config: NodeConfig | None = None,
    gpu_budget: int | str | None = None,
    name: str | None = None,
) -> Connecting:
    """Connect as `dataplane.connect`, for asyncio. `await` the result, or enter it by `async with`."""
    return Connecting(address, config, gpu_budget=gpu_budget, name=name)


_DOORS = {"ray": "dataplane.integrations.ray"}
"""The modules that find a node, by the address that names their system, such as `ray`."""


def _abandon(starting: Future[tuple[str, embedded.EmbeddedNode | None]]) -> None:
    if not starting.cancelled() and not starting.exception() and (node := starting.result()[1]) is not None:
        node.abandon()


def _resolved(address: str, config: NodeConfig | None, dead: str = "") -> str:
    """Ask the system that `address` names for the address of this host's node, other than `dead`. Blocks. Raises the
    errors of the integration."""
    found: str = importlib.import_module(_DOORS[address]).find(config, dead)
    return found
