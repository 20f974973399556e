"""The processor time of a step with images in the processes of verl. `python -m bench.doors_steps`.

The calls of `fit()` and their fields, without verl: 16 prompts of an image of 448 x 448, 8 responses each, 26 fields.
An agent loop puts each trajectory by itself, the 8 of a prompt concurrently. A rank reads all fields of all rows, three
times, and puts a field. The driver reads a few fields and puts two. Then all rows are cleared. `looked at`: each value
that was read is accessed, but no pixel.

A figure is the processor time of the whole process, all threads, for a row, without that of the node, a storage unit
and the controller. One process makes the calls of all roles, one after another. On a shared host, processor time varies
less than seconds. `bench.doors_fit` measures storage's share of a step.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.jobs import BACKENDS, by_turns, serve, transfer_queue
from bench.measure import Row, row, table, write_json

PROMPTS, RESPONSES, SIDE, TOKENS = 16, 8, 448, 290
PARTITION = "train"
FEW = ("input_ids", "responses", "response_mask", "rm_scores", "uid")
"""The fields that the driver reads."""


def _prompt(number: int) -> tuple[Any, Any]:
    """The file of an image, and the pixels that a processor makes of it."""
    import numpy as np
    import torch
    from PIL import Image

    drawn = np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(drawn).save(file, "PNG", compress_level=0)
    return file.getvalue(), torch.randn(1024, 1176, generator=torch.Generator().manual_seed(number))


def trajectory(prompt: int, response: int, file: bytes, pixels: Any) -> Any:
    """The fields of a response, as put by verl's agent loop."""
    import torch
    from PIL import Image
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    length = 3 + response % 5
    image = Image.open(io.BytesIO(file))
    messages = [{"role": "user", "content": [{"type": "image", "bytes": file, "path": None, "image": image}]}]
    ids = torch.arange(TOKENS + length) + prompt
    tensors = {
        "prompts": ids[:TOKENS].clone(),
        "responses": ids[TOKENS:].clone(),
        "response_mask": torch.ones(length, dtype=torch.int64),
        "rollout_log_probs": torch.full((length,), -0.5),
        "rm_scores": torch.full((length,), float(response)),
        "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
        "loss_mask": torch.ones(length, dtype=torch.int64),
        "input_ids": ids,
        "position_ids": torch.arange(TOKENS + length).repeat(4, 1),
    }
    reward = {"score": float(response), "acc": False, "letters": 2, "said": "fd"}
    others: dict[str, Any] = {
        "num_turns": 2,
        "metrics": {"generate_sequences": 0.25, "compute_score": 1.5, "num_preempted": 0},
        "extra_fields": {"global_steps": 0, "updates": 0.0, "turn_scores": [], "reward_extra_info": reward},
        "mm_processor_kwargs": {},
        "mm_processor_output": None,
        "session_id": response,
        "data_source": "made_up",
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": "behknqtwz"},
        "extra_info": {"index": prompt, "split": "made"},
        "raw_prompt": messages,
        "index": prompt,
        "tools_kwargs": {},
        "interaction_kwargs": {},
        "uid": f"72723175-c831-4527-9233-{prompt:012}",
        "global_steps": 1,
        "multi_modal_inputs": {
            "pixel_values": pixels.clone(),
            "image_grid_thw": torch.tensor([[1, 32, 32]]),
            "images_seqlens": torch.tensor([1024]),
        },
    }
    fields = {name: tensor.unsqueeze(0) for name, tensor in tensors.items()}
    fields |= {name: NonTensorStack(NonTensorData(value)) for name, value in others.items()}
    return TensorDict(fields, batch_size=[1])


class Steps:
    """The calls of TransferQueue in a step."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._prompts = 0
        self.draw()
        self._keys = [f"{p}_{r}_0" for p in range(PROMPTS) for r in range(RESPONSES)]
        self._got: Any = None

    def draw(self) -> None:
        """Draw new images, as each step of verl has."""
        drawn = [_prompt(self._prompts + number) for number in range(PROMPTS)]
        self._rows = [[trajectory(p, r, *drawn[p]) for r in range(RESPONSES)] for p in range(PROMPTS)]
        self._prompts += PROMPTS

    def round(self, _: str) -> dict[str, float]:
        """Make the calls of a step. Returns the milliseconds of processor time a row, by call."""
        steps: dict[str, Callable[[], Any]] = {
            "put, one by one": self._put,
            "get all": self._get,
            "get all, looked at": lambda: look(self._get()),
            "put a field": lambda: self._put_fields("old_log_probs"),
            "get few": self._get_few,
            "put two fields": lambda: self._put_fields("advantages", "returns"),
            "get all, of several puts": self._get,
            "clear": lambda: self._queue.kv_clear(keys=self._keys, partition_id=PARTITION),
        }
        found = {}
        self.draw()
        for name, step in steps.items():
            before = time.process_time()
            step()
            found[name] = (time.process_time() - before) * 1e3 / len(self._keys)
        return found

    def _put(self) -> None:
        async def put(prompt: int, response: int) -> None:
            fields, key = self._rows[prompt][response], f"{prompt}_{response}_0"
            tag = {"status": "success", "prompt_len": TOKENS, "response_len": 5, "seq_len": 295, "global_steps": 1}
            await self._queue.async_kv_batch_put(keys=[key], fields=fields, tags=[tag], partition_id=PARTITION)

        async def put_all() -> None:
            for prompt in range(PROMPTS):
                await asyncio.gather(*(put(prompt, response) for response in range(RESPONSES)))

        asyncio.run(put_all())

    def _get(self) -> Any:
        return self._queue.kv_batch_get(keys=self._keys, partition_id=PARTITION)

    def _get_few(self) -> Any:
        return self._queue.kv_batch_get(keys=self._keys, partition_id=PARTITION, select_fields=list(FEW))

    def _put_fields(self, *names: str) -> None:
        import torch
        from tensordict import TensorDict

        lengths = [3 + response % 5 for _ in range(PROMPTS) for response in range(RESPONSES)]
        nested = torch.nested.as_nested_tensor([torch.zeros(n) for n in lengths], layout=torch.jagged)
        fields = TensorDict(dict.fromkeys(names, nested), batch_size=[len(self._keys)])
        self._queue.kv_batch_put(keys=self._keys, partition_id=PARTITION, fields=fields)


def look(got: Any) -> None:
    """Access each value of each field."""
    for name in got.keys():  # noqa: SIM118  # of a TensorDict, whose iterator is over rows
        entry = got.get(name)
        values = entry.tolist() if type(entry).__name__ == "NonTensorStack" else entry.unbind()
        assert len(values) == len(got)


def _serve(door: str) -> None:
    with transfer_queue(door, "1GiB", 128 << 20) as queue:
        serve(Steps(queue).round)


def rows_of(found: dict[str, list[dict[str, float]]]) -> list[Row]:
    """Milliseconds a row, without a promise: `bench.doors_fit` has one for the step."""
    rows = []
    for name in next(iter(found.values()))[0]:
        for door, several in found.items():
            values = [each[name] for each in several]
            rows.append(row(f"{door}: {name}", values, at_most=float("inf"), unit="ms a row"))
    return rows


def main() -> int:
    """Measure, print, write JSON. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.doors_steps", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of each door (%(default)s)")
    parser.add_argument("--door", choices=BACKENDS, action="append", help="this one alone, or those (all)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/doors_steps.json"))
    parser.add_argument("--serve", choices=BACKENDS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve:
        _serve(chosen.serve)
        return 0
    found = by_turns("bench.doors_steps", chosen.door or BACKENDS, chosen.rounds)
    rows = rows_of(found)
    print(table(rows))
    write_json(chosen.json, rows, {"doors": found, "least": {d: _least(of) for d, of in found.items()}})
    return 0


def _least(several: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in several) for name in several[0]}


if __name__ == "__main__":
    sys.exit(main())
