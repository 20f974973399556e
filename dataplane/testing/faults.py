"""Calls that fail on request."""

from __future__ import annotations

import functools
import inspect
import threading
from types import TracebackType
from typing import Any


class Failing:
    """A call of a class or an object, some of whose next uses fail. Created by `failing`; a context manager.

    `calls`: the number of uses; `failures`: of those that failed. After the `with` block the call is restored.
    Thread-safe.
    """

    def __init__(self, owner: Any, name: str, error: BaseException, times: int, after: int, done: bool) -> None:
        self.calls = 0
        self.failures = 0
        self._owner, self._name, self._error = owner, name, error
        self._times, self._after, self._done = times, after, done
        self._lock = threading.Lock()
        self._own = name in vars(owner)
        self._before = inspect.getattr_static(owner, name)
        self._called = getattr(owner, name)

    def _fails(self) -> bool:
        with self._lock:
            self.calls += 1
            fails = self._after < self.calls <= self._after + self._times
            self.failures += fails
        return fails

    def __enter__(self) -> Failing:
        called = self._called

        if inspect.iscoroutinefunction(called):

            @functools.wraps(called)
            async def wrapped_async(*args: Any, **kwargs: Any) -> Any:
                fails = self._fails()
                result = await called(*args, **kwargs) if self._done or not fails else None
                if fails:
                    raise self._error
                return result

            setattr(self._owner, self._name, wrapped_async)
            return self

        @functools.wraps(called)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            fails = self._fails()
            result = called(*args, **kwargs) if self._done or not fails else None
            if fails:
                raise self._error
            return result

        setattr(self._owner, self._name, wrapped)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._own:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)


def failing(
    owner: Any, call: str, error: BaseException, *, times: int = 1, after: int = 0, done: bool = False
) -> Failing:
    """A context manager in which some calls of `owner.call` raise `error`.

    `owner` is an object (a plane, a transport, a coordinator) or a class (`dp.Stream`: the call fails on every stream).
    The first `after` calls are carried out, the next `times` raise, all later ones are carried out. With `done`, a call
    that raises is carried out first: so a test can check how its code handles `OutcomeUnknown`. Calls may be functions
    or coroutine functions. Raises AttributeError if there is no such call, TypeError if it is not a method.

        with testing.failing(dp.Stream, "append", dp.Backpressure("no room"), times=2) as appends:
            my_producer(plane)
        assert appends.failures == 2
    """
    static = inspect.getattr_static(owner, call)
    if not callable(getattr(owner, call)) or isinstance(static, staticmethod | classmethod):
        raise TypeError(f"{call} of {owner!r} is no method")
    return Failing(owner, call, error, times, after, done)
