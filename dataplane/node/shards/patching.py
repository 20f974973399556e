"""Shards of other nodes that are made here, from a local shard and its changes.

A request names the steps that lead to a shard: a base shard, the delta (`weights.deltas`) that turns the base into the
shard, then the same for the base, and so on. If a base is in memory here as a whole, the deltas that follow it are
fetched like any shard, before memory is reserved for the result.

Invariants: if a step fails for any reason, the shard is fetched as if no steps had been given. By the checksums of the
deltas, the result has the bytes of the owner's shard.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dataplane.batch.layout_check import check_layout
from dataplane.batch.ref import ShardKey
from dataplane.batch.rows import RowIndices
from dataplane.clock import Deadline
from dataplane.errors import Corrupt, DataplaneError
from dataplane.node.shards.remote import Want
from dataplane.store.store import Pinned, Store
from dataplane.threads import Pool, stopped
from dataplane.weights import deltas
from dataplane.weights.layout import FIELD
from dataplane.wire.shard_messages import Step

if TYPE_CHECKING:
    from dataplane.node.shards.fetch import Fetcher

log = logging.getLogger(__name__)

_ONE_ROW: list[Want] = [((0,), RowIndices.range(0, 1), [])]


class Patching:
    """The shards that one node makes from others. Used from its event loop."""

    def __init__(self, node: bytes, store: Store, fetcher: Fetcher) -> None:
        self._node = node
        self._store = store
        self._fetcher = fetcher
        self._pool = Pool(2, "dataplane-patch")
        self.made = 0
        """Number of shards made here since the start."""

    def __str__(self) -> str:
        return "what is made of older versions"

    @asynccontextmanager
    async def ready(self, wanted: Sequence[tuple[int, Sequence[Step]]], deadline: Deadline) -> AsyncIterator[None]:
        """A context in which copies are made from local shards where possible. `wanted`: for each the local number and
        the steps."""
        chosen = {number: found for number, steps in wanted if steps and (found := self._found(number, steps))}
        keys = list(dict.fromkeys(key for _, needed in chosen.values() for key in needed))
        async with AsyncExitStack() as undo:
            if keys:
                with suppress(DataplaneError):
                    numbers = await self._fetcher.find([(*key, _ONE_ROW) for key in keys], deadline)
                    pinned = await self._store.pin(self, numbers, deadline)
                    undo.callback(self._drop, keys, numbers)
                    here = dict(zip(keys, pinned, strict=True))
                    for number, (base, needed) in chosen.items():
                        patch = partial(self._patch, base, [here[key] for key in needed])
                        undo.callback(self._fetcher.patch(number, patch))
            yield

    def _found(self, number: int, steps: Sequence[Step]) -> tuple[int, list[ShardKey]] | None:
        """A local base of the copy, and the keys of the deltas that follow it. None if no base is here, or if the copy
        is in memory or being read."""
        if self._store.shards.find(number).coming:
            return None
        needed: list[ShardKey] = []
        for node, base, delta_node, delta in steps:
            needed.insert(0, (delta_node, delta))
            here = base if node == self._node else self._fetcher.copy(node, base)
            if here is not None and self._store.shards.ready(here):
                return here, needed
        return None

    def _drop(self, keys: Sequence[ShardKey], numbers: Sequence[int]) -> None:
        """Unpin and forget deltas that were applied or are not needed."""
        self._store.unpin(self, numbers)
        for key in keys:
            self._fetcher.forget(key)

    async def _patch(self, base: int, needed: Sequence[Pinned], layout: bytes, memory: memoryview) -> bool:
        """Make a shard of this layout in `memory`. Returns whether the shard was made."""
        held: Sequence[Pinned] | None = None
        with suppress(DataplaneError):  # it was freed or forgotten meanwhile
            held = self._store.pin_now(self, [base])
        if held is None:
            return False
        try:
            with ExitStack() as views:
                old, *changes = [
                    (views.enter_context(self._store.arena.view(each.extent)), each.layout) for each in [*held, *needed]
                ]
                making = self._pool.submit(_make, (memory, layout), old, changes)
                try:
                    await asyncio.wrap_future(making)
                finally:
                    await stopped([making])
        except (DataplaneError, OSError) as error:
            log.warning("fetching a whole shard: applying its changes to an earlier version failed: %s", error)
            return False
        finally:
            self._store.unpin(self, [base])
        self.made += 1
        return True

    async def aclose(self) -> None:
        await self._pool.aclose()


Shard = tuple[memoryview, bytes]
"""The memory of a shard, and its encoded layout."""


def _make(target: Shard, old: Shard, changes: Sequence[Shard]) -> None:
    """Apply the changes to `old`, in a thread. Raises Corrupt if the shard cannot be made."""
    deltas.apply(_values(old), [_values(change) for change in changes], _values(target))
    memory, encoded = target
    head = _place(target)[0]
    if encoded != old[1]:
        raise Corrupt("a shard that is to be made of one of another layout")
    memory[:head] = old[0][:head]


def _place(shard: Shard) -> tuple[int, int]:
    """The offset and size of the values of the shard's only column, which is ragged. Raises Corrupt."""
    memory, encoded = shard
    layout = check_layout(encoded, len(memory)).layout
    if len(layout.columns) != 1 or layout.columns[0][1].field != FIELD:
        raise Corrupt("a shard that is no chunk of weights")
    return layout.columns[0][1].buffers[1]


def _values(shard: Shard) -> deltas.Bytes:
    offset, size = _place(shard)
    return np.frombuffer(shard[0], np.uint8, size, offset)
