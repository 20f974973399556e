"""Generates the rows that are moved, in each producer from a few numbers, and computes their checksums.

Invariants: a producer's columns depend only on its share and its seed, so every system moves the same bytes. Each row
has memory of its own, as if an image processor ran once a response: equal pixels are copies. Only NumPy and xxhash are
imported: it runs in every system's environment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

Columns = dict[str, Any]  # a dense array, or a list of an array a row

#: verl's columns: three over prompt and response, six over the response, each 8 bytes a token.
WHOLE = ("input_ids", "attention_mask", "position_ids")
ANSWER = ("responses", "response_mask", "old_log_probs", "ref_log_probs", "advantages", "returns")
PATCH = 1176
#: Of a mixture of experts: layers that route, experts a token in each, of so many. Of a teacher: tokens that it gives
#: log-probs of. Of hidden states: numbers a token.
LAYERS, TOP, EXPERTS = 47, 4, 128
TEACHER_TOP, HIDDEN = 64, 4096
#: Tokens of a row that is put by itself.
SINGLE = 512


@dataclass(frozen=True)
class Share:
    """The rows of one producer: `fields` dense columns [rows, width]; a row for each response to `inputs`; `singles`
    rows that are put and got one by one, like an agent's; or rows of so many `tokens`, whose columns `of` names:
    "routed", the experts of each layer; "teacher", the most likely tokens and their log-probs; or "hidden" states."""

    rows: int = 0
    fields: int = 0
    width: int = 0
    #: For each prompt: its tokens, the patches of its video, and the tokens of its responses.
    inputs: tuple[int, ...] = ()
    patches: tuple[int, ...] = ()
    responses: tuple[tuple[int, ...], ...] = ()
    singles: int = 0
    tokens: tuple[int, ...] = ()
    of: str = ""

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.rows or self.singles or len(self.tokens) or sum(map(len, self.responses))

    @property
    def nbytes(self) -> int:
        """The bytes of all values; each row has its own."""
        dense = self.rows * self.fields * self.width * 4
        tokens = sum(
            8 * (len(WHOLE) * (prompt + answer) + len(ANSWER) * answer)
            for prompt, answers in zip(self.inputs, self.responses, strict=True)
            for answer in answers
        )
        pixels = sum(
            4 * PATCH * patches * len(answers) for patches, answers in zip(self.patches, self.responses, strict=True)
        )
        each = {"": 0, "routed": LAYERS * TOP * 8, "teacher": TEACHER_TOP * 12, "hidden": HIDDEN * 2}[self.of]
        return dense + tokens + pixels + self.singles * (SINGLE * 12 + 8) + sum(self.tokens) * each


def share_of(told: dict[str, Any]) -> Share:
    """The share of a decoded JSON object."""
    return Share(
        told["rows"], told["fields"], told["width"], tuple(told["inputs"]), tuple(told["patches"]),
        tuple(tuple(answers) for answers in told["responses"]), told["singles"], tuple(told["tokens"]), told["of"],
    )  # fmt: skip


def columns(share: Share, seed: int) -> Columns:
    """Generate the rows of a share."""
    source = np.random.default_rng(seed)
    if share.fields:
        size = (share.rows, share.width)
        return {f"field_{i}": source.random(size, dtype=np.float32) for i in range(share.fields)}
    if share.singles:
        size = (share.singles, SINGLE)
        ids, scores = source.integers(0, 150_000, size), source.random(size, dtype=np.float32)
        return {"ids": ids, "logp": scores, "reward": source.random(share.singles)}
    if share.tokens:
        return _of_tokens(share, source)
    made: Columns = {name: [] for name in (*WHOLE, *ANSWER, "pixel_values")}
    for prompt, patches, answers in zip(share.inputs, share.patches, share.responses, strict=True):
        pixels = source.random((patches, PATCH), dtype=np.float32)
        for answer in answers:
            for name in WHOLE:
                made[name].append(source.integers(0, 150_000, prompt + answer))
            for name in ANSWER:
                made[name].append(source.integers(0, 150_000, answer))
            made["pixel_values"].append(pixels.copy())
    if not any(share.patches):
        del made["pixel_values"]
    return made


def _of_tokens(share: Share, source: np.random.Generator) -> Columns:
    if share.of == "routed":
        return {"routed_experts": [source.integers(0, EXPERTS, (n, LAYERS, TOP)) for n in share.tokens]}
    if share.of == "teacher":
        return {
            "teacher_ids": [source.integers(0, 150_000, (n, TEACHER_TOP)) for n in share.tokens],
            "teacher_logprobs": [-source.random((n, TEACHER_TOP), dtype=np.float32) for n in share.tokens],
        }
    return {"hidden_states": [source.random((n, HIDDEN), dtype=np.float32).astype(np.float16) for n in share.tokens]}


def shared(whole: Columns, rank: int, ranks: int) -> Columns:
    """The share of each row that a context-parallel rank reads: chunks `rank` and 2 x ranks - 1 - rank of 2 x ranks
    chunks, as in Megatron-LM."""
    found: Columns = {}
    for name, values in whole.items():
        found[name] = []
        for row in values:
            half = -(-len(row) // (2 * ranks))
            other = 2 * ranks - 1 - rank
            parts = row[rank * half : (rank + 1) * half], row[other * half : (other + 1) * half]
            found[name].append(np.concatenate(parts))
    return found


def part(whole: Columns, index: int, count: int) -> Columns:
    """The consecutive rows of consumer `index` of `count`, as views."""
    first, last = bounds(rows_of(whole), index, count)
    return {name: values[first:last] for name, values in whole.items()}


def bounds(rows: int, index: int, count: int) -> tuple[int, int]:
    """The begin and end of the rows of consumer `index`."""
    return rows * index // count, rows * (index + 1) // count


def rows_of(whole: Columns) -> int:
    """The number of rows."""
    return len(next(iter(whole.values())))


def digest(some: Columns) -> str:
    """The xxh3 checksum of the bytes, dtype and shape of every row of every column, in order of the columns' names.
    Narrower integers are converted to int64, because a system may return integers narrower than it was given."""
    total = xxhash.xxh3_128()
    for name in sorted(some):
        total.update(name.encode())
        for row in some[name]:
            array = np.ascontiguousarray(row)
            array = array.astype(np.int64) if array.dtype.kind in "iu" and array.dtype.itemsize < 8 else array
            total.update(f"{array.dtype.str}{array.shape}".encode())
            total.update(array.reshape(-1).view(np.uint8))
    return total.hexdigest()


def joined(several: Sequence[Columns]) -> Columns:
    """The rows of all, one after the other."""
    if len(several) == 1:
        return several[0]
    return {name: [row for some in several for row in some[name]] for name in several[0]}


def nbytes(some: Columns) -> int:
    """The bytes of the values."""
    return sum(
        sum(row.nbytes for row in values) if isinstance(values, list) else values.nbytes for values in some.values()
    )
