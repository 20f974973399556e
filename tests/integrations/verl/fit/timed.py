"""When a run's processes are in calls of TransferQueue, in files of a directory (`FIT_TIMES`), for the benchmark.

A call is what the trainer, the agent loops and `tqbridge` in the ranks await; times are of a clock that all share.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transfer_queue as tq
from verl.utils import transferqueue_utils

_CALLS = ("kv_put", "kv_batch_put", "kv_batch_get", "kv_list", "kv_clear")
_BRIDGE = ("_meta_to_realdata", "_update_meta_with_output", "kv_batch_meta2batch_meta", "batch_meta2kv_batch_meta")


def wrap() -> None:
    """Write each call from now on."""
    for name in _CALLS:
        for each in (name, f"async_{name}"):
            setattr(tq, each, _timed(getattr(tq, each)))
    for name in _BRIDGE:
        setattr(transferqueue_utils, name, _timed(getattr(transferqueue_utils, name)))


def _timed(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return function(*arguments, **named)
        finally:
            _write(name, began, named.get("partition_id"))

    @functools.wraps(function)
    async def call_async(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        try:
            return await function(*arguments, **named)
        finally:
            _write(name, began, named.get("partition_id"))

    return call_async if inspect.iscoroutinefunction(function) else call


def _write(name: str, began: float, partition: str | None) -> None:
    with Path(os.environ["FIT_TIMES"], f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps([name, partition, began, time.monotonic()]) + "\n")
