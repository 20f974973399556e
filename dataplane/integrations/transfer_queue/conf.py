"""What a configuration of TransferQueue's may say: every setting that is none is refused, with the nearest that is one.

A configuration is a mapping, nested, or one of OmegaConf. The settings of TransferQueue's own backends are passed over:
verl's configuration names them all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from dataplane.config import NodeConfig

OTHERS = ("SimpleStorage", "MooncakeStore", "Yuanrong", "RayStore")
"""TransferQueue's own backends."""

_SHOWN = 24  # names that an error lists

_NODE = tuple(each.name for each in fields(NodeConfig))
_KNOWN: dict[str, Iterable[str]] = {
    "": ("enable", "metrics", "controller", "backend"),
    "metrics": ("enabled", "port", "endpoint"),
    "controller": ("sampler", "polling_mode", "zmq_info"),
    "backend": ("storage_backend", "Dataplane", *OTHERS),
    "backend.Dataplane": ("dense", "job", "node"),
    "backend.Dataplane.node": _NODE,
}


def at(conf: Any, path: str) -> Any:
    """What it has there, names with dots between; None where it has nothing."""
    for name in filter(None, path.split(".")):
        if conf is None or not hasattr(conf, "get"):
            return None
        conf = conf.get(name)
    return conf


def check(conf: Any) -> None:
    """Raises ValueError for a setting that is none, and for a part that is no mapping."""
    for path, known in _KNOWN.items():
        part = at(conf, path)
        if part is None:
            continue
        if not hasattr(part, "keys"):
            raise ValueError(f"{path or 'a configuration'} is a mapping of settings, not {type(part).__name__}")
        for name in part.keys():  # noqa: SIM118  # OmegaConf's iterates over values where it is a list
            if name not in known:
                raise ValueError(_unknown("setting", f"{path}.{name}".lstrip("."), name, known, path))
    backend = at(conf, "backend.storage_backend")
    if backend is not None and backend not in ("Dataplane", *OTHERS):
        raise ValueError(_unknown("backend", str(backend), str(backend), ("Dataplane", *OTHERS)))


def _unknown(what: str, named: str, name: str, known: Iterable[str], path: str = "") -> str:
    return f"there is no {what} {named!r}: {nearest(name, known, path)}"


def nearest(name: object, known: Iterable[str], path: str = "") -> str:
    """Advice for a name that is none of the known: the one that was meant, else those that there are."""
    listed = list(known)
    near = difflib.get_close_matches(str(name), listed, 1, 0.5)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    there = (", ".join(listed[:_SHOWN]) or "none") + more
    return f"did you mean {f'{path}.{near[0]}'.lstrip('.')}?" if near else f"there are {there}"
