"""Ray's object store: `ray.put` stores each consumer's part, with its arrays out of band, and `ray.get` returns views.

Each process is a driver of one cluster. References, of a few bytes each, pass through a named actor.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import ray

from bench.peers.work import Columns


class Server:
    """A cluster of one node, and the actor that keeps the references."""

    def __init__(self, told: dict[str, Any]) -> None:
        room = max(told["nbytes"] * 3 // 2, 256 << 20)
        started = ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=room, log_to_driver=False,
            namespace="bench", _temp_dir=told["scratch"], _node_ip_address="127.0.0.1",
        )  # fmt: skip
        self._book = ray.remote(Book).options(name="book", num_cpus=0).remote()
        ray.get(self._book.names.remote())
        self.address = {"address": started["address"] if isinstance(started, dict) else started.address_info["address"]}

    def close(self) -> None:
        """End the cluster."""
        ray.shutdown()


class Book:
    """The actor that keeps references by name."""

    def __init__(self) -> None:
        self._kept: dict[str, list[Any]] = {}

    def keep(self, name: str, ref: list[Any]) -> None:
        """Keep a reference under this name."""
        self._kept[name] = ref

    def find(self, name: str) -> list[Any]:
        """The reference of this name."""
        return self._kept[name]

    def forget(self, names: Sequence[str]) -> None:
        """Remove these references."""
        for name in names:
            self._kept.pop(name, None)

    def names(self) -> list[str]:
        """All names."""
        return list(self._kept)


class Door:
    """A driver of the cluster."""

    def __init__(self, address: dict[str, Any]) -> None:
        ray.init(address=address["address"], namespace="bench", log_to_driver=False)
        self._book = ray.get_actor("book")

    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Put an object for each part."""
        rows = len(next(iter(columns.values())))
        tokens = []
        for i in range(parts):
            first, last = rows * i // parts, rows * (i + 1) // parts
            ref = ray.put({column: values[first:last] for column, values in columns.items()})
            tokens.append(json.dumps([name, i]))
            ray.get(self._book.keep.remote(tokens[-1], [ref]))
        return tokens

    def get(self, token: str) -> Columns:
        """Views of the object."""
        (ref,) = ray.get(self._book.find.remote(token))
        columns: Columns = ray.get(ref)
        return columns

    def drop(self, tokens: Sequence[str]) -> None:
        """Release the references."""
        ray.get(self._book.forget.remote(list(tokens)))

    def close(self) -> None:
        """Disconnect from the cluster."""
        ray.shutdown()
