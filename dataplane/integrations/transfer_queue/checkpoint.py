"""Checkpoints of all partitions: rows, tags, fields and who consumed which, in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def save_checkpoint(
    checkpoint_dir: str | Path, *, include_storage: bool = True, metadata: dict[str, Any] | None = None
) -> None:
    """To come."""
    raise NotImplementedError


def load_checkpoint(checkpoint_dir: str | Path) -> None:
    """To come."""
    raise NotImplementedError
