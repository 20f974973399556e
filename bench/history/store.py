"""The cost of a history with many prompts: a node's memory beyond the tokens, and the times to record and look up
responses."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import psutil

import dataplane as dp

MIB = 1 << 20


def run(prompts: int = 50_000, tokens: int = 256, batch: int = 2048, epochs: int = 1) -> dict[str, Any]:
    """Record a response of `tokens` tokens for each prompt and epoch, by reference and in batches. Returns figures."""
    size = prompts * tokens * 4 * epochs
    config = dp.NodeConfig(memory=size * 3 // 2 + 64 * MIB, spill=0, prewarm=0)
    random = np.random.default_rng(0)
    with dp.connect(config=config) as plane:
        node = psutil.Process(plane.stats().pid)
        history = plane.history("bench", keep=epochs, max_bytes=2 * size, samples=1)
        history.add("warm", [1, 2, 3])
        before, began, put_s = node.memory_info(), time.perf_counter(), 0.0
        for epoch, first in ((epoch, first) for epoch in range(epochs) for first in range(0, prompts, batch)):
            keys = [f"prompt-{number}" for number in range(first, min(prompts, first + batch))]
            responses = random.integers(0, 32_000, (len(keys), tokens)).astype(np.int32)
            at = time.perf_counter()
            ref = plane.put({"key": keys, "response_ids": list(responses)})
            put_s += time.perf_counter() - at
            history.record(ref, epoch=epoch)
            plane.free(ref)
        record_s = time.perf_counter() - began - put_s
        after = node.memory_info()
        took, single = [], []
        for number in random.integers(0, prompts, 200).tolist():
            at = time.perf_counter()
            history.drafter(f"prompt-{number}")
            took.append(time.perf_counter() - at)
        for number in range(200):
            at = time.perf_counter()
            history.add(f"single-{number}", responses[0], epoch=epochs)
            single.append(time.perf_counter() - at)
        at = time.perf_counter()
        history.lengths([f"prompt-{number}" for number in range(1024)])
        lengths_s = time.perf_counter() - at
        used = plane.stats().memory_used
    own = (after.rss - after.shared) - (before.rss - before.shared)
    found = {
        "prompts": prompts,
        "responses of each": epochs,
        "tokens a response": tokens,
        "node's bytes a prompt, beside the arena": own / prompts,
        "arena over tokens": used / size,
        "bytes a token beyond the token": own / (prompts * tokens * epochs) + (used / size - 1) * 4,
        "us to record a response, in batches": record_s / (prompts * epochs) * 1e6,
        "us to add one response": float(np.median(single)) * 1e6,
        "us to make a drafter": float(np.median(took)) * 1e6,
        "ms, lengths of 1024 prompts": lengths_s * 1e3,
    }
    for name, value in found.items():
        print(f"{name}: {value:.4g}", file=sys.stderr)
    return found
