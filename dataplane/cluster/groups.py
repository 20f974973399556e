"""Errors of a group of tasks."""

from __future__ import annotations


def first_of(error: BaseException, kinds: tuple[type[BaseException], ...]) -> BaseException:
    """The first error of a group, or of nested groups. If some errors are of other kinds than these, raises them.

    `except*` is not used: whether an error raised in it is in a group again depends on the Python version (gh-103590).
    """
    if isinstance(error, BaseExceptionGroup):
        others = error.split(kinds)[1]
        if others is not None:
            raise others
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
