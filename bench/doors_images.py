"""Images that the responses of a prompt share, put with each response: bytes and time. `python -m bench.doors_images`.

64 prompts have an image of half a mebibyte of pixels and 8 responses each. As in verl's agent loop, each response is
put by itself with its own copy of the pixels, the 8 of a prompt concurrently. They go through TransferQueue's
SimpleStorage, which stores every copy, through our storage, and through ours without sharing. The three alternate, each
in a process of its own. A round also reads one response of each prompt and clears all.

Run it in the environment of `make test-integrations`.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench.jobs import by_turns, serve, transfer_queue
from bench.measure import Row, finished, row, table

PROMPTS, RESPONSES, PATCHES, WIDTH, TOKENS = 64, 8, 112, 1176, 256
PARTITION = "images"
DOORS = ("SimpleStorage", "Dataplane", "Dataplane apart")
BOUND = 1 / 8 + 0.05


def _trajectory(prompt: int, response: int) -> tuple[Any, int]:
    """The fields of a response, and their bytes."""
    import torch
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    pixels = torch.randn(PATCHES, WIDTH, generator=torch.Generator().manual_seed(prompt))
    inputs = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 8, 14]])}
    lengths = {"prompts": TOKENS, "responses": TOKENS, "input_ids": 2 * TOKENS, "position_ids": 8 * TOKENS}
    ids = {name: torch.full((length,), response) for name, length in lengths.items()}
    fields: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([each], layout=torch.jagged) for name, each in ids.items()
    }
    fields["multi_modal_inputs"] = NonTensorStack(NonTensorData(inputs))
    nbytes = sum(int(each.nbytes) for each in [*ids.values(), *inputs.values()])
    return TensorDict(fields, batch_size=[1]), nbytes


async def _put(queue: Any) -> tuple[list[float], float, int]:
    """Put all responses. Returns the seconds of each put and of all, and the bytes of all values."""
    times, whole_s, logical = [], 0.0, 0

    async def put(key: str, fields: Any) -> None:
        began = time.perf_counter()
        await queue.async_kv_batch_put(keys=[key], fields=fields, partition_id=PARTITION)
        times.append(time.perf_counter() - began)

    for prompt in range(PROMPTS):
        made = [_trajectory(prompt, response) for response in range(RESPONSES)]
        logical += sum(nbytes for _, nbytes in made)
        began = time.perf_counter()
        await asyncio.gather(*(put(f"{prompt}_{number}", fields) for number, (fields, _) in enumerate(made)))
        whole_s += time.perf_counter() - began
    return times, whole_s, logical


def _round(queue: Any, *, ours: bool) -> dict[str, float]:
    from dataplane.integrations import process

    def used() -> int:
        return process.plane().stats().memory_used if ours else 0

    before = used()
    times, whole_s, logical = asyncio.run(_put(queue))
    stored = used() - before if ours else logical
    got = queue.kv_batch_get(keys=[f"{prompt}_{RESPONSES - 1}" for prompt in range(PROMPTS)], partition_id=PARTITION)
    for prompt, entry in enumerate(got["multi_modal_inputs"]):
        inputs = entry if isinstance(entry, dict) else entry.data
        expected = _trajectory(prompt, 0)[0]["multi_modal_inputs"][0]
        assert (inputs["pixel_values"] == expected["pixel_values"]).all(), "what was read is what was put"
        del inputs
    del got, entry
    keys = [f"{prompt}_{response}" for prompt in range(PROMPTS) for response in range(RESPONSES)]
    queue.kv_clear(keys=keys, partition_id=PARTITION)
    return {
        "stored": stored,
        "logical": logical,
        "put": statistics.median(times),
        "all": whole_s,
        "left": used() - before,
    }


def _serve(door: str) -> None:
    """Answer rounds with this storage with their figures."""
    from dataplane.integrations.transfer_queue import sharing

    if door.endswith("apart"):
        sharing.LEAST = sharing.TENSOR = 1 << 62
    with transfer_queue(door.split()[0], "1GiB", 128 << 20) as queue:
        serve(lambda _: _round(queue, ours=door != "SimpleStorage"))


def rows_of(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """The promises."""
    theirs, ours, apart = (found[door] for door in DOORS)
    stored = [each["stored"] / other["stored"] for each, other in zip(ours, theirs, strict=True)]
    kept = f"{ours[0]['stored'] / (1 << 20):.1f} of {theirs[0]['stored'] / (1 << 20):.1f} MiB"
    ratios = [other["all"] / each["all"] for each, other in zip(ours, theirs, strict=True)]
    medians = [statistics.median(each["put"] for each in of) * 1e3 for of in (theirs, apart, ours)]
    detail = f"a put {medians[0]:.1f}, with nothing shared {medians[1]:.1f}, shared {medians[2]:.1f} ms"
    return [
        row("Dataplane: stored", stored, at_most=BOUND, unit="x", detail=kept),
        row("Dataplane: puts, over SimpleStorage", ratios, at_least=1.0, unit="x", detail=detail),
        row("Dataplane: left", [each["left"] for each in ours], at_most=0.0, unit="bytes"),
    ]


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_images", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each door (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_images.json"))
    parser.add_argument("--serve", choices=DOORS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        _serve(chosen.serve)
        return 0
    found = by_turns("bench.doors_images", DOORS, chosen.rounds)
    rows = rows_of(found)
    print(table(rows))
    return finished(chosen.json, rows, {"doors": found})


if __name__ == "__main__":
    sys.exit(main())
