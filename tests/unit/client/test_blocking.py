"""Blocking iterators: what is left to be closed at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from dataplane.client.blocking import Blocking
from dataplane.errors import PeerUnavailable


class Caller:
    """Runs coroutines, until its node has gone."""

    gone = False

    def __call__(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        if not self.gone:
            return asyncio.run(coroutine)
        coroutine.close()
        raise PeerUnavailable("the node has gone", address="there")


def test_a_blocking_iterator_closes_without_error_after_the_node_is_lost() -> None:
    async def items() -> AsyncIterator[int]:
        yield 1
        yield 2

    calls, turns = Caller(), Any
    made: Any = Blocking(None, calls, turns)._each(items())  # type: ignore[arg-type]
    assert next(made) == 1
    calls.gone = True
    made.close()
