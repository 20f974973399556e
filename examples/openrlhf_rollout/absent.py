"""Placeholders for vLLM, DeepSpeed and flash-attention, which need CUDA, while OpenRLHF is imported on a CPU.

They compute nothing: generation and the optimizer step are the example's own (`workers`). The rest of OpenRLHF is
used as installed. Afterwards they are removed, so that no library finds these packages.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

_NAMES = [
    "vllm",
    "vllm.inputs",
    "vllm.utils",
    "deepspeed",
    "deepspeed.ops",
    "deepspeed.ops.adam",
    "deepspeed.runtime",
    "deepspeed.runtime.zero",
    "deepspeed.runtime.zero.offload_config",
    "deepspeed.runtime.zero.partition_parameters",
    "flash_attn",
    "flash_attn.bert_padding",
    "flash_attn.utils",
    "flash_attn.utils.distributed",
]


class _Absent(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class SamplingParams(SimpleNamespace):
    """In place of vLLM's: it only keeps its arguments."""


@contextmanager
def stood_in() -> Iterator[None]:
    """A context in which these modules can be imported. Installed packages are not replaced."""
    made = []
    for name in _NAMES:
        root = name.partition(".")[0]
        if name not in sys.modules and (root in made or importlib.util.find_spec(root) is None):
            module = _Absent(name)
            module.__spec__, module.__path__, module.__version__ = ModuleSpec(name, None, is_package=True), [], "1.0"
            sys.modules[name] = module
            made.append(name)
    if "vllm" in made:
        sys.modules["vllm"].SamplingParams = SamplingParams  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in made:
            del sys.modules[name]
