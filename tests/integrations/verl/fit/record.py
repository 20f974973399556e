"""What trainer and validation saw, row by row, in files of a directory (`FIT_RECORD`), and how runs are compared.

A row is plain: dicts, lists, strings and numbers as they are; an array its dtype, shape and bytes; an image its mode,
size and bytes. So rows are equal where every byte is. A prompt's `uid` is drawn anew in each run: a row is known by its
phase, its step, its prompt's place in the data set, and its session.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_numbers = itertools.count()
_OF_ONE_RUN = ("uid", "metrics")  # drawn, and timings
_OF_A_MOMENT = ("global_steps", "log_probs", "old_log_probs", "ref_log_prob")  # follow the updates
_EXTRAS = ("reward_extra_info", "turn_scores", "tool_rewards")  # of `extra_fields`, the others follow them too


def rows(phase: str, data: Any) -> None:
    """Write the rows of a TensorDict that a phase was given."""
    if not asked():
        return
    columns = {name: list(_rows(data.get(name))) for name in data.keys() if _is_column(data.get(name))}  # noqa: SIM118
    _write("rows", [(phase, dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True)])


def sampled(partition: str, step: int, keys: list[str], tags: list[dict[str, Any]]) -> None:
    """Write what a replay buffer gave."""
    if asked():
        _write("tags", [(partition, step, key, plain(tag)) for key, tag in zip(keys, tags, strict=True)])


def asked() -> bool:
    return "FIT_RECORD" in os.environ


def _is_column(entry: Any) -> bool:
    return hasattr(entry, "unbind") and type(entry).__name__ != "NonTensorData"


def _rows(entry: Any) -> Any:
    found = entry.tolist() if type(entry).__name__ == "NonTensorStack" else entry.unbind()
    return map(plain, found)


def plain(value: Any) -> Any:
    """What a value comes to, of builtin types alone."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(plain(each) for each in value)
    if kind == "Tensor":
        array = value.detach().contiguous()
        return "tensor", str(array.dtype), tuple(array.shape), array.reshape(-1).numpy().tobytes()
    if kind == "ndarray":
        if value.dtype == object:
            return "array", "object", value.shape, plain(value.tolist())
        return "array", str(value.dtype), value.shape, value.tobytes()
    if hasattr(value, "getbands"):
        return "image", value.mode, value.size, value.tobytes()
    return value if value is None or isinstance(value, str | bytes | int | float) else (kind, repr(value))


def _write(what: str, content: Any) -> None:
    with Path(os.environ["FIT_RECORD"], f"{what}_{os.getpid()}_{next(_numbers)}").open("wb") as file:
        pickle.dump(content, file)


class Seen:
    """What one run saw: `rows` by phase, step, index and session; `tags` likewise by partition."""

    def __init__(self, directory: Path) -> None:
        self.rows: dict[tuple[str, int, int, int], dict[str, Any]] = {}
        prompts: dict[str, int] = {}
        for phase, row in _read(directory, "rows"):
            index = int(row["index"][3] if isinstance(row["index"], tuple) else row["index"])
            prompts[row["uid"]] = index
            known_by = (phase, row["global_steps"], index, row["session_id"])
            kept = {name: value for name, value in row.items() if name not in _OF_ONE_RUN}
            assert self.rows.setdefault(known_by, kept) == kept, f"{known_by} was given twice, and differs"
        self.tags: dict[tuple[str, int, int, int], Any] = {}
        for partition, step, key, tag in _read(directory, "tags"):
            uid, session, _ = key.rsplit("_", 2)
            self.tags[partition, step, prompts[uid], int(session)] = tag

    def digest(self) -> str:
        """One of all of it, equal for runs that saw the same."""
        return hashlib.sha256(repr(_sorted([self.rows, self.tags])).encode()).hexdigest()

    def lasting(self) -> dict[tuple[str, int, int], dict[str, Any]]:
        """The rows by phase, index and session, without what follows from when they were made."""
        return {(phase, index, session): _lasting(row) for (phase, _, index, session), row in self.rows.items()}

    def trained(self, step: int | None = None) -> set[int]:
        """The prompts that the actor was updated with, in one step or any."""
        return {index for partition, of, index, _ in self.tags if partition == "train" and step in (None, of)}

    def spans(self) -> list[int]:
        """With how many versions of the weights each trajectory was made."""
        return [tag["max_global_steps"] - tag["min_global_steps"] + 1 for tag in self.tags.values()]


def _lasting(row: dict[str, Any]) -> dict[str, Any]:
    extras = {name: value for name, value in row["extra_fields"].items() if name in _EXTRAS}
    return {name: value for name, value in row.items() if name not in _OF_A_MOMENT} | {"extra_fields": extras}


def _sorted(value: Any) -> Any:
    """The same with mappings in one order."""
    if isinstance(value, dict):
        return sorted((repr(key), _sorted(each)) for key, each in value.items())
    return [_sorted(each) for each in value] if isinstance(value, list | tuple) else value


def _read(directory: Path, what: str) -> Any:
    for path in sorted(directory.glob(f"{what}_*")):
        yield from pickle.loads(path.read_bytes())
