"""Measure the integration with TransferQueue, compared with its own storage in the same run.

    python -m bench.doors [--rounds 7] [--json FILE]

Run it in the environment of `make test-integrations` (`.venv-integrations`), which has TransferQueue.

The backends are SimpleStorage and ours. The batch is the small simple case of TransferQueue's throughput script:
float32 randn(1024, 8192) in each of 9 fields, 288 MiB. A writer puts it, a reader in another process gets it and reads
every value, and the writer clears it. A round does this with each backend, in two Ray jobs. Times are those of
`kv_batch_put` and `kv_batch_get`. Reading the values is timed separately, too: with memory that is shared, the first
access of pages comes after the get.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from bench.jobs import BACKENDS, actors, by_turns, serve, transfer_queue
from bench.measure import Row, row, table, write_json

ROWS, FIELDS, SEQUENCE = 1024, 9, 8192
NBYTES = ROWS * FIELDS * SEQUENCE * 4
PARTITION = "bench"


class _End:
    """The actor that writes or reads."""

    def __init__(self) -> None:
        import torch
        import transfer_queue as tq
        from tensordict import TensorDict

        tq.init()
        self._keys = [f"row_{i}" for i in range(ROWS)]
        source = torch.Generator().manual_seed(0)
        fields = {f"field_{i}": torch.randn(ROWS, SEQUENCE, generator=source) for i in range(FIELDS)}
        self._sum = sum(float(values.sum()) for values in fields.values())
        self._batch = TensorDict(fields, batch_size=ROWS)

    def put(self) -> float:
        import transfer_queue as tq

        from bench.measure import timed

        return timed(lambda: tq.kv_batch_put(self._keys, PARTITION, self._batch))

    def get(self) -> tuple[float, float]:
        """Seconds of the get, and of reading every value. Checks their sum."""
        import time

        import transfer_queue as tq

        began = time.perf_counter()
        got = tq.kv_batch_get(self._keys, PARTITION)
        had = time.perf_counter()
        flat = [entry.values() if entry.is_nested else entry for entry in got.values()]
        total = sum(float(values.sum()) for values in flat)
        read = time.perf_counter()
        assert abs(total - self._sum) < 1, "what was read is what was put"
        return had - began, read - had

    def clear(self) -> float:
        import transfer_queue as tq

        from bench.measure import timed

        return timed(lambda: tq.kv_clear(self._keys, PARTITION))


def _serve(backend: str) -> None:
    """Answer the rounds of a Ray job with this backend with their times."""
    with transfer_queue(backend, "1GiB", 256 << 20):
        import ray

        writer, reader = actors(_End)

        def measured(_: str) -> dict[str, float]:
            put = ray.get(writer.put.remote())
            get, touch = ray.get(reader.get.remote())
            return {"put": put, "get": get, "read": touch, "clear": ray.get(writer.clear.remote())}

        serve(measured)


def backend(rounds: int) -> list[Row]:
    """TransferQueue's put and get with our storage, compared with its own."""
    seen = by_turns("bench.doors", BACKENDS, rounds)
    pairs = list(zip(seen["SimpleStorage"], seen["Dataplane"], strict=True))

    def ratios(*steps: str) -> list[float]:
        return [sum(t[s] for s in steps) / sum(o[s] for s in steps) for t, o in pairs]

    def rates(*steps: str) -> str:
        medians = {name: NBYTES / statistics.median(sum(t[s] for s in steps) for t in seen[name]) for name in BACKENDS}
        return ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in medians.items())

    return [
        row("backend: put, times faster", ratios("put"), at_least=2, unit="x", detail=rates("put")),
        row("backend: get, times faster", ratios("get"), at_least=5, unit="x", detail=rates("get")),
        row(
            "backend: get and read, times faster",
            ratios("get", "read"),
            at_least=5,
            unit="x",
            detail=rates("get", "read"),
        ),
        row(
            "backend: put and get, times faster", ratios("put", "get"), at_least=2, unit="x", detail=rates("put", "get")
        ),
        row("backend: clear, of theirs", [1 / r for r in ratios("clear")], at_most=2, unit="x"),
    ]


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="how often (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors.json"))
    parser.add_argument("--serve", choices=BACKENDS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        _serve(chosen.serve)
        return 0
    rows = backend(chosen.rounds)
    print(table(rows), flush=True)
    write_json(chosen.json, rows, {})
    print(f"written to {chosen.json}")
    return 0 if all(r.met for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
