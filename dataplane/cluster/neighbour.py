"""How the end of a node's process is seen at once: by a connection that its kernel resets.

Each node listens at a port of its own (its pulse), and has one connection, to the pulse of the next member in the order
of their numbers. Nothing is ever sent on it. When that process ends, its kernel ends the connection and refuses the
next one; then, and only then, the node has ended. So the cost is one idle connection a node whatever their number, and
nothing that is merely slow is taken for dead: not a process that is stopped or starved, not a host behind a cut link.

What always holds: only a process that this node was connected to, and whose address refuses connections since, has
ended; somebody who refuses from the beginning (a firewall, say) proves nothing. What comes to this node's own pulse is
not read, and the oldest of more than a few connections is closed, which proves nothing either.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress

from dataplane.cluster.membership import Member
from dataplane.config import check_host_port

log = logging.getLogger(__name__)

_MOST = 32  # connections to this node's pulse
_AGAIN_S, _MAX_AGAIN_S = 0.2, 10.0
_CONNECT_S = 10.0


class Neighbour:
    """See the module. `run` it in the loop that it is used from."""

    def __init__(self, host: str, me: Member, ended: Callable[[bytes], None]) -> None:
        """Listens on `host` from now on (empty: every address). `ended(node)` is called when that one's process has
        ended. Raises OSError."""
        self._me = me
        self._ended = ended
        self._pulses: Mapping[bytes, str] = {}
        self._moved = asyncio.Event()
        self._held: deque[socket.socket] = deque()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MOST)
        self._listener.setblocking(False)
        told = me.address.removeprefix("tcp://").rpartition(":")[0]
        self.address = f"{told}:{self._listener.getsockname()[1]}"
        """HOST:PORT of this node's pulse."""

    def follow(self, pulses: Mapping[bytes, str]) -> None:
        """The other members, and where their pulses are."""
        if pulses != self._pulses:
            self._pulses = dict(pulses)
            self._moved.set()

    async def run(self) -> None:
        """Hold the connection to the next, until cancelled."""
        loop = asyncio.get_running_loop()
        self._listen()
        try:
            while True:
                self._moved.clear()
                following = self._next()
                holding = (
                    None if following is None else loop.create_task(self._hold(following, self._pulses[following]))
                )
                try:
                    while self._next() == following:
                        await self._moved.wait()
                        self._moved.clear()
                finally:
                    if holding is not None:
                        holding.cancel()
                        await asyncio.gather(holding, return_exceptions=True)
        finally:
            self.close()

    def close(self) -> None:
        """Listen no more. Idempotent."""
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
        self._listener.close()
        while self._held:
            self._held.pop().close()

    def _next(self) -> bytes | None:
        """The member after this one, in a ring."""
        me, others = self._me.node, sorted(node for node, pulse in self._pulses.items() if pulse)
        return next((node for node in others if node > me), others[0] if others else None)

    async def _hold(self, node: bytes, pulse: str) -> None:
        """Be connected to it; say when it has ended."""
        loop = asyncio.get_running_loop()
        again_s, connected = _AGAIN_S, False
        while True:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    reader, writer = await self._connect(pulse)
            except ConnectionRefusedError:
                if connected:
                    self._ended(node)
                    return
            except (OSError, ValueError, TimeoutError) as error:
                log.info("no connection to the pulse of node %s: %s", node.hex(), error)
            else:
                began, connected, again_s = loop.time(), True, _AGAIN_S
                try:
                    with suppress(OSError):
                        await reader.read(1)  # nothing comes but the end
                finally:
                    writer.close()
                    with suppress(OSError):
                        await writer.wait_closed()
                if loop.time() - began > _AGAIN_S:
                    continue
            await asyncio.sleep(again_s)
            again_s = min(2 * again_s, _MAX_AGAIN_S)

    async def _connect(self, pulse: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        check_host_port(pulse)
        host, _, port = pulse.rpartition(":")
        return await asyncio.open_connection(host.removeprefix("[").removesuffix("]"), int(port))

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors, most likely
            log.warning("the pulse's connections can not be accepted now: %s", error)
            loop.remove_reader(self._listener.fileno())
            loop.call_later(_AGAIN_S, self._listen)
            return
        self._held.append(connection)
        if len(self._held) > _MOST:
            self._held.popleft().close()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
