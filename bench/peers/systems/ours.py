"""dataplane: a node, and a plane for each process. Equal rows of pixels are stored once, by `dedupe`."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import dataplane as dp
from bench.peers.work import Columns


class Server:
    """A node."""

    def __init__(self, told: dict[str, Any]) -> None:
        config = dp.NodeConfig(memory=max(told["nbytes"] * 3 // 2, 256 << 20), spill_dir=told["scratch"])
        self._plane = dp.connect(config=config)
        self.address: dict[str, Any] = {"address": self._plane.address, "pids": [self._plane.stats().pid]}

    def close(self) -> None:
        """End the node."""
        self._plane.close()


class Door:
    """A plane."""

    def __init__(self, address: dict[str, Any]) -> None:
        self._plane = dp.connect(address["address"])
        self._put: list[dp.BatchRef] = []

    def put(self, name: str, columns: Columns, parts: int) -> Sequence[str]:
        """Put all rows at once. Returns the references of the parts."""
        dedupe = ["pixel_values"] if "pixel_values" in columns else ()
        narrow = "routed_experts" in columns or "teacher_ids" in columns
        if "teacher_ids" in columns:
            columns = {"teacher": {"ids": columns["teacher_ids"], "logprobs": columns["teacher_logprobs"]}}
        ref = self._plane.put(columns, dedupe=dedupe, narrow=narrow)
        self._put.append(ref)
        rows = len(ref)
        ends = [rows * i // parts for i in range(parts + 1)]
        return [base64.b64encode(ref[a:b].encode()).decode() for a, b in pairwise(ends)]

    def get(self, token: str) -> Columns:
        """Views of the rows of a part."""
        return self._got(dp.BatchRef.decode(base64.b64decode(token)))

    def share(self, token: str, rank: int, ranks: int) -> Columns:
        """The share of each row that a rank reads. The rest is not read."""
        ref = dp.BatchRef.decode(base64.b64decode(token))
        return self._got(ref.share_rows(ref.columns, rank, ranks, zigzag=True))

    def _got(self, ref: dp.BatchRef) -> Columns:
        batch = self._plane.get(ref)
        if "teacher" in batch:
            of = batch["teacher"]
            return {f"teacher_{key}": of[key].narrow().numpy() for key in ("ids", "logprobs")}
        return {name: batch[name].narrow().numpy() for name in batch}

    def drop(self, tokens: Sequence[str]) -> None:
        """Free all rows that this plane has put."""
        while self._put:
            self._plane.free(self._put.pop())

    def close(self) -> None:
        """Disconnect from the node."""
        self._plane.close()
