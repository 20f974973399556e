"""Cases of a rule that one test goes through."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

Test = Callable[..., Any]


def each_case(
    names: str | Sequence[str], values: Iterable[Any], ids: Sequence[object] | Callable[[Any], object] | None = None
) -> Callable[[Test], Test]:
    """A decorator with the arguments of `pytest.mark.parametrize` that runs the test once a case, all as one test.

    An error says which case it is of. Each has a `tmp_path`, a `monkeypatch` and captured output of
    its own; other fixtures are shared, so they may hold nothing that a case changes.
    """
    named = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    cases = [_case(named, value) for value in values]

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)

        @contextmanager
        def runs(number: int, given: dict[str, Any], skipped: list[BaseException]) -> Iterator[dict[str, Any]]:
            with ExitStack() as stack:
                own = given | cases[number]
                if isinstance(path := given.get("tmp_path"), Path):
                    own["tmp_path"] = path / str(number)
                    own["tmp_path"].mkdir()
                if "monkeypatch" in given:
                    own["monkeypatch"] = stack.enter_context(pytest.MonkeyPatch.context())
                if "caplog" in given:
                    given["caplog"].clear()
                if "capsys" in given:
                    given["capsys"].readouterr()
                try:
                    yield own
                except pytest.skip.Exception as skip:
                    skipped.append(skip)
                except (Exception, pytest.fail.Exception) as error:
                    error.add_note(f"case {number}: {_told(cases[number], ids, number)}")
                    raise

        def end(skipped: list[BaseException]) -> None:
            if cases and len(skipped) == len(cases):
                raise skipped[0]

        if inspect.iscoroutinefunction(test):

            @functools.wraps(test)
            async def go(*args: Any, **given: Any) -> None:
                skipped: list[BaseException] = []
                for number in range(len(cases)):
                    with runs(number, given, skipped) as own:
                        await test(*args, **own)
                end(skipped)
        else:

            @functools.wraps(test)
            def go(*args: Any, **given: Any) -> None:
                skipped: list[BaseException] = []
                for number in range(len(cases)):
                    with runs(number, given, skipped) as own:
                        test(*args, **own)
                end(skipped)

        left = [parameter for name, parameter in signature.parameters.items() if name not in named]
        go.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return go

    return decorate


def _case(names: list[str], value: Any) -> dict[str, Any]:
    if hasattr(value, "values") and hasattr(value, "marks"):  # of pytest.param
        assert not value.marks, "a marked case is a test of its own"
        return dict(zip(names, value.values, strict=True))
    return {names[0]: value} if len(names) == 1 else dict(zip(names, value, strict=True))


def _told(case: dict[str, Any], ids: Sequence[object] | Callable[[Any], object] | None, number: int) -> str:
    """The case in words."""
    if ids is not None and not callable(ids):
        return str(ids[number])
    return ", ".join(f"{name} = {repr(value)[:200]}" for name, value in case.items())
