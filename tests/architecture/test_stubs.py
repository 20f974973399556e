"""The stub of the compiled methods says what the methods are."""

from __future__ import annotations

import inspect

from dataplane.client import blocking_calls
from tests import stubs


def test_the_stub_agrees_with_the_compiled_methods() -> None:
    assert stubs.parsed(stubs.PATH.read_text()) == stubs.parsed(stubs.stub()), "run: python -m tests.stubs"


def test_a_changed_signature_is_seen() -> None:
    changed = stubs.stub().replace("create: bool = False", "create: bool = True")
    assert stubs.parsed(changed) != stubs.parsed(stubs.stub())


def test_every_class_of_compiled_methods_is_in_the_stub() -> None:
    defined = {name for name, kind in vars(blocking_calls).items() if inspect.isclass(kind) and name.endswith("Calls")}
    assert {kind.__name__ for kind in stubs.classes()} == defined
