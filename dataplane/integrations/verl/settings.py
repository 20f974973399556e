"""The settings of the backend: the section `backend.Dataplane` of TransferQueue's configuration.

    transfer_queue.backend.storage_backend=Dataplane
    +transfer_queue.backend.Dataplane.memory=64GiB      # and so on; all of it is optional

Invariants: an unknown setting is refused by name when TransferQueue is initialised, and not ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from dataplane.config import TRANSPORTS, NodeConfig
from dataplane.errors import Misuse

NAME = "Dataplane"
"""The name of the backend in TransferQueue's configuration."""

_TIMEOUT_S = 60.0
_FLAGS = ("dense", "fallback")
_NODE = tuple(field.name for field in fields(NodeConfig))


@dataclass(frozen=True, slots=True)
class StorageSettings:
    """The settings of one job.

    node: the settings of `NodeConfig` that the section has, by name.
    transports: the data transports between hosts, the preferred one first. Empty: chosen for each host.
    key: the file with the nodes' key. None: a key is created for the job.
    timeout: seconds that a put or a get waits for room.
    dense: return fields whose rows have one shape as dense tensors. TransferQueue returns them jagged, and verl
        relies on that.
    fallback: if the backend does not work with the installed version of TransferQueue, warn, and use TransferQueue's
        own storage. If it is False, the job fails at its start.
    """

    node: Mapping[str, Any]
    transports: tuple[str, ...] = ()
    key: str | None = None
    timeout: float = _TIMEOUT_S
    dense: bool = False
    fallback: bool = False

    @classmethod
    def of(cls, given: Mapping[str, Any] | None) -> StorageSettings:
        """The settings of the section. Raises Misuse for an unknown one."""
        rest = {str(name): value for name, value in (given or {}).items() if value is not None}
        node = {name: rest.pop(name) for name in _NODE if name in rest}
        transports, key = rest.pop("transports", ()), rest.pop("key", None)
        timeout = rest.pop("timeout", _TIMEOUT_S)
        flags = {name: rest.pop(name, False) for name in _FLAGS}
        if rest:
            known = ", ".join((*_NODE, "transports", "key", "timeout", *_FLAGS))
            raise Misuse(f"backend.{NAME} has no setting {', '.join(sorted(rest))}: there are {known}")
        named = tuple(transports.replace(",", " ").split() if isinstance(transports, str) else map(str, transports))
        if set(named) - set(TRANSPORTS) or len(set(named)) < len(named):
            raise Misuse(f"backend.{NAME}.transports are some of {', '.join(TRANSPORTS)}, each once, not {named}")
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not timeout >= 0:
            raise Misuse(f"backend.{NAME}.timeout is a number of seconds, not {timeout!r}")
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise Misuse(f"backend.{NAME}.{name} is true or false, not {value!r}")
        if key is not None and not Path(str(key)).is_file():
            raise Misuse(f"backend.{NAME}.key is a file that `dataplane keygen` wrote; there is none at {key}")
        return cls(node, named, None if key is None else str(key), float(timeout), **flags)

    def config(self) -> NodeConfig | None:
        """The nodes' settings; None if there are none. Raises Misuse for an invalid value."""
        if not self.node:
            return None
        try:
            return NodeConfig(**self.node)
        except (ValueError, TypeError) as error:
            raise Misuse(f"backend.{NAME}: {error}") from error
