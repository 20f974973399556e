"""verl's `register` for worker methods that take RemoteProtos: the method gets DataProtos, and its result is put.

    from dataplane.integrations.verl.dispatch import register     # in the place of verl's

    class ActorWorker(Worker):
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"), columns=["input_ids"])
        def compute_log_prob(self, data: DataProto) -> DataProto: ...

Invariants: without a RemoteProto among its arguments, a method behaves as under verl's own `register`; a rank whose
result verl does not collect stores nothing. A method may also use verl's own `register`, and call `get` and `put`
itself.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import Any

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, Execute
from verl.single_controller.base.decorator import register as register_of_verl

from dataplane.integrations.verl.columns import SHARED
from dataplane.integrations.verl.proto import RemoteProto, put


def register(
    dispatch_mode: Any = Dispatch.ALL_TO_ALL,
    execute_mode: Any = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    columns: Sequence[str] | None = None,
    lazy: Collection[str] = (),
    dedupe: Collection[str] = SHARED,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As verl's, with its arguments.

    columns: those that are read of each RemoteProto, if it has them; None: all.
    lazy: those of them with dicts whose rows are returned as handles, read at the first access.
    dedupe: columns of the result of which equal rows are stored once.
    """

    def read(given: Any) -> Any:
        if not isinstance(given, RemoteProto):
            return given
        there = [*(given.batch or ()), *given.non_tensor_batch]
        chosen = there if columns is None else [name for name in columns if name in there]
        return given.get(chosen, lazy=[name for name in lazy if name in chosen])

    def stored(result: Any, given: tuple[Any, ...]) -> Any:
        of = [each for each in given if isinstance(each, RemoteProto)]
        if not of or not isinstance(result, DataProto):
            return result
        return put(result, dedupe=dedupe, scope=of[0].scope) if _is_collected(dispatch_mode, given) else None

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            result = method(*map(read, args), **{name: read(value) for name, value in kwargs.items()})
            return stored(result, (*args, *kwargs.values()))

        @wraps(method)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            result = await method(*map(read, args), **{name: read(value) for name, value in kwargs.items()})
            return stored(result, (*args, *kwargs.values()))

        inner = awaited if inspect.iscoroutinefunction(method) else called
        of_verl: Callable[..., Any] = register_of_verl(dispatch_mode, execute_mode, blocking, materialize_futures)(
            inner
        )
        return of_verl

    return decorate


def _is_collected(dispatch_mode: Any, given: tuple[Any, ...]) -> bool:
    """Whether verl collects this rank's result: in an N-D mesh, only of ranks that the worker registered."""
    if not isinstance(dispatch_mode, dict):
        return True
    mesh = getattr(dispatch_mode.get("collect_fn"), "args", ())
    ask = getattr(given[0], "query_collect_info", None)
    return ask is None or not mesh or not isinstance(mesh[0], str) or bool(ask(mesh[0]))
