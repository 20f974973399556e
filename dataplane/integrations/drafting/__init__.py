"""Integrations of a history's drafts: Hugging Face's `generate` and vLLM's proposers. Each imports its system late."""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash


def prompt_key(tokens: Any) -> str:
    """A key of a prompt, given by a flat sequence of token ids: their XXH3-128, as text."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tokens, np.int64).tobytes())
