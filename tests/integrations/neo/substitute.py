"""A plugin of pytest: `InMemoryStorageEngine` is the plane's engine, for tests that take it from verl."""

from __future__ import annotations

import os
from typing import Any

import verl.experimental.neoproto as neoproto

from dataplane.integrations.verl.neo import DataplaneStorageEngine


class OneByOne(DataplaneStorageEngine):
    """Reads as verl's engine in memory does: value by value, and each whole."""

    get_rows = get_rows_many = property()  # type: ignore[assignment]  # it has none, for `hasattr`

    def get_many(self, refs: list[Any], apply_ops: bool = True) -> list[Any]:
        return [self.get(ref) for ref in refs]


neoproto.InMemoryStorageEngine = OneByOne if os.environ["NEO_READS"] == "one by one" else DataplaneStorageEngine
