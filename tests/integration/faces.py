"""Both faces behind one: what is called on the asynchronous one is run in a loop of the test's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import dataplane as dp
from dataplane.client.delivery import Taken

_WRAPPED = (dp.aio.Draft, dp.aio.AsyncStream, dp.aio.AsyncTable, dp.aio.Delivery, Taken)


class Awaited:
    """An asynchronous object; its coroutines are run to their end."""

    def __init__(self, runner: asyncio.Runner, inner: Any) -> None:
        self._runner = runner
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if inspect.isasyncgenfunction(value) or name == "deliveries":  # which returns such a generator
            return lambda *args, **kwargs: self._iterated(value(*args, **kwargs))
        if name == "table":  # which sends nothing
            return lambda *args, **kwargs: self._wrapped(value(*args, **kwargs))
        if not inspect.iscoroutinefunction(value) and name != "consume":  # which returns what is to be awaited
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            async def called() -> Any:
                return await value(*args, **kwargs)

            return self._wrapped(self._runner.run(called()))

        return call

    def _wrapped(self, result: Any) -> Any:
        return Awaited(self._runner, result) if isinstance(result, _WRAPPED) else result

    def _iterated(self, several: Any) -> Iterator[Any]:
        async def following() -> Any:
            return await anext(several, None)

        try:
            while (found := self._runner.run(following())) is not None:
                yield self._wrapped(found)
        finally:
            self._runner.run(several.aclose())

    def __len__(self) -> int:
        return len(self._inner)

    def __getitem__(self, name: Any) -> Any:
        return self._inner[name]

    def __enter__(self) -> Awaited:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._inner.__aexit__(kind, error, trace))


class AsyncFace(Awaited):
    """An asynchronous plane, called as the synchronous one is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        runner = asyncio.Runner()

        async def attach() -> dp.aio.AsyncPlane:
            return await dp.aio.connect(*args, **kwargs)

        try:
            super().__init__(runner, runner.run(attach()))
        except BaseException:
            runner.close()
            raise

    def close(self) -> None:
        self._runner.run(self._inner.aclose())

    def __exit__(self, *_: Any) -> None:
        self.close()
        self._runner.close()


FACES: dict[str, Any] = {"sync": dp.connect, "aio": AsyncFace}
