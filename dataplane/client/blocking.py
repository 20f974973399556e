"""Blocking methods, compiled from the methods of an asynchronous class.

`blocking(AsyncStream, "consume ...")` makes a class with a blocking method for each name. Such a method has the
parameters, defaults and docstring of the asynchronous one, runs its coroutine, and waits for the result.
`client.blocking_calls` makes the classes. `client.sync` derives from them and defines the other methods.

The methods are compiled from source text, as those of a dataclass. So a call costs as much as a method written by hand,
an error about an argument names the blocking class, and the frame has the parameters as local variables, which
`diagnosis.recorder` reads.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import operator
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from types import FunctionType
from typing import Any, Protocol, Self, TypeVar

from dataplane.client.loop_runner import LoopRunner
from dataplane.errors import Closed, Forked, Misuse, PeerUnavailable

T = TypeVar("T")

CLASSES: dict[type, Callable[[Any, BlockingCall, LoopRunner], Any]] = {}
"""For each asynchronous class, the blocking class that wraps its instances."""

_WRAPPED = re.compile(r"\b(Async\w+|Consuming|Delivery|Draft|Taken)\b")  # result types with a blocking class
_END = object()


class BlockingCall(Protocol):
    """A function that runs a coroutine, and returns its result or raises its error."""

    def __call__(self, coroutine: Coroutine[Any, Any, T], /) -> T: ...


class Blocking:
    """The base of all blocking classes: an asynchronous object, and the loop runner that runs its coroutines."""

    def __init__(self, inner: Any, wait: BlockingCall, turns: LoopRunner) -> None:
        self._inner = inner
        self._wait = wait
        self._turns = turns

    def __reduce__(self) -> tuple[Any, ...]:
        kind = type(self).__name__
        raise Misuse(f"{kind} belongs to the process that made it and cannot be pickled: send its name, or its `ref`")

    def _wrap(self, found: Any) -> Any:
        """The result, wrapped in its blocking class if there is one."""
        kind = CLASSES.get(type(found))
        return found if kind is None else kind(found, self._wait, self._turns)

    def _each(self, items: AsyncIterator[Any]) -> Iterator[Any]:
        """Iterate over an asynchronous generator, and close it at the end. If this iterator is garbage-collected within
        a call of the plane, another thread closes the generator. It is not closed if the plane was closed, the node has
        ended, or this is a forked child."""

        used = asyncio.Lock()  # an error of a signal handler leaves `following` running until it is cancelled

        async def following() -> Any:
            async with used:
                return await anext(items, _END)

        async def close() -> None:
            async with used:
                await items.aclose()  # type: ignore[attr-defined]

        try:
            while (found := self._wait(following())) is not _END:
                yield self._wrap(found)
        finally:
            with suppress(Closed, Forked, PeerUnavailable):
                if self._turns.within:
                    self._turns.begin(close())
                else:
                    self._wait(close())


class Context(Blocking):
    """A blocking object that is a context manager, as the asynchronous object is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None = None, _: object = None) -> None:
        self._wait(self._inner.__aexit__(kind, error, None))


def of_inner(name: str, shown: str = "") -> Any:
    """A property: this attribute of the asynchronous object. `shown`: its docstring."""
    return property(operator.attrgetter(f"_inner.{name}"), doc=shown or None)


def blocking(of: type, names: str) -> type:
    """Make a class with a blocking method, or a property, for each of these members of the class `of`. The attribute
    `_of` is used to write the stub."""
    shown = of.__name__.removeprefix("Async")
    members = {name: vars(of)[name] for name in names.split()}
    functions = {name: getattr(member, "fget", member) for name, member in members.items()}
    sources = [_source(functions[name], members[name], exchange=hasattr(of, f"_exchange_{name}")) for name in members]
    compiled = _compiled(f"{__file__} ({shown})", sources)
    module = f"{__name__}_calls"
    found: dict[str, Any] = {"__doc__": f"The calls of `{shown}`.", "__module__": module, "_of": of}
    for name, function in functions.items():
        made: FunctionType = compiled[name]
        made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        made.__doc__ = function.__doc__ and renamed(function.__doc__)
        made.__annotations__ = {key: renamed(value) for key, value in function.__annotations__.items()}
        made.__module__, made.__qualname__ = module, f"{shown}.{name}"
        found[name] = property(made) if isinstance(members[name], property) else made
    return type(f"{shown}Calls", (Blocking,), found)


def renamed(text: str) -> str:
    """An annotation or a docstring, with the names of the blocking classes."""
    if "Async" in text:
        text = re.sub(r"(?:\b[a-z_]+\.)?\bAsync([A-Z]\w+)", r"\1", text)
    return text.replace("Consuming", "Delivery")


def _source(function: FunctionType, member: Any, *, exchange: bool) -> str:
    """The source of the blocking method, without its defaults, which are set after it is compiled. `exchange`: whether
    the class has a method `_exchange_NAME` with the same parameters, which may return a request that needs no task."""
    name, returns = function.__name__, function.__annotations__.get("return", "")
    code, flags = function.__code__, function.__code__.co_flags
    positional, variables = code.co_argcount, list(code.co_varnames)
    keywords = positional + code.co_kwonlyargcount
    passed, named, rest = variables[1:positional], variables[positional:keywords], variables[keywords:]
    parameters = ["self", *passed]
    if flags & inspect.CO_VARARGS:
        passed.append(f"*{rest.pop(0)}")
        parameters.append(passed[-1])
    elif named:
        parameters.append("*")
    parameters += named
    passed += [f"{each}={each}" for each in named]
    if flags & inspect.CO_VARKEYWORDS:
        passed.append(f"**{rest[0]}")
        parameters.append(passed[-1])
    first = ""
    if exchange:
        first = (
            "    if self._turns.free and not self._inner.traced:\n"
            f"        asked = self._inner._exchange_{name}({', '.join(passed)})\n"
            "        if asked is not None:\n            return self._turns.ask(asked)\n"
        )
    value = f"self._inner.{name}" + ("" if isinstance(member, property) else f"({', '.join(passed)})")
    if returns == "Consuming":
        value = f"awaited({value})"
    if returns == "Consuming" or flags & inspect.CO_COROUTINE:
        value = f"self._wait({value})"
    if returns.startswith("AsyncIterator["):
        value = f"(yield from self._each({value}))"
    elif _WRAPPED.search(returns):
        value = f"self._wrap({value})"
    return f"def {name}({', '.join(parameters)}):\n{first}    return {value}\n"


def _compiled(file: str, sources: Any) -> dict[str, Any]:
    """Compile these sources. Returns their functions by name. Tracebacks show the sources as lines of `file`."""
    text = "\n".join(sources)
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    found: dict[str, Any] = {"__name__": __name__, "awaited": _awaited}
    exec(compile(text, file, "exec"), found)
    return found


async def _awaited(result: Awaitable[T]) -> T:
    return await result
