"""The synchronous face of weights: each call waits for the asynchronous one's coroutine. It adds no logic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dataplane.client import weights
from dataplane.client.sync_streams import Wait
from dataplane.client.tables import TIMEOUT_S
from dataplane.client.weight_map import Tensors
from dataplane.errors import NotReady
from dataplane.weights.slices import Selected


class Weights:
    """See `dataplane.client.weights.AsyncWeights`; here each call waits. Any thread may use it."""

    def __init__(self, inner: weights.AsyncWeights, wait: Wait) -> None:
        self._inner = inner
        self._wait = wait

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def name(self) -> str:
        """The name of the weights."""
        return self._inner.name

    @property
    def keep(self) -> int:
        """How many versions are kept."""
        return self._inner.keep

    def publish(self, version: int, tensors: Any, *, rank: int = 0, ranks: int = 1, timeout: float = TIMEOUT_S) -> None:
        """Publish a version, or one rank's part of it. See `AsyncWeights.publish`."""
        self._wait(self._inner.publish(version, tensors, rank=rank, ranks=ranks, timeout=timeout))

    def get(
        self,
        version: int | str | None = None,
        *,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Selected] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Tensors:
        """The tensors of a version, in place. See `AsyncWeights.get`."""
        return self._wait(self._inner.get(version, names=names, slices=slices, timeout=timeout))

    def versions(self) -> list[int]:
        """The versions that are complete, the oldest first."""
        return self._wait(self._inner.versions())

    def newer(self, than: int | None = None, *, timeout: float = TIMEOUT_S) -> int:
        """The newest version, once it is newer than this one. See `AsyncWeights.newer`."""
        return self._wait(self._inner.newer(than, timeout=timeout))

    def watch(self, after: int | None = None) -> Iterator[int]:
        """The newest version, and each that is the newest later. See `AsyncWeights.watch`."""
        while True:
            with suppress(NotReady):
                after = self.newer(after)
                yield after

    def drop(self) -> None:
        """All versions go. See `AsyncWeights.drop`."""
        self._wait(self._inner.drop())
