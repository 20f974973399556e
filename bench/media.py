"""Images: the cost of their put and get compared with bytes of the same size, and how often they are stored.

Images that were opened and not loaded are stored as their files. Their get returns an image a row, not decoded; a get
of bytes returns bytes a row. Both are run alternately, and each ratio is of such a pair.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import dataplane as dp
from bench.measure import Row, finished, measured, row

RUNS = 30
IMAGES, RESPONSES = 64, 8
WIDTH, HEIGHT = 1280, 960  # noise: as many bytes as a photo of four times the pixels


def files() -> list[bytes]:
    """PNG files of noise, which PNG does not compress."""
    source, made = np.random.default_rng(0), []
    for _ in range(IMAGES):
        out = io.BytesIO()
        Image.fromarray(source.integers(0, 256, (HEIGHT, WIDTH), dtype=np.uint8)).save(out, "PNG", compress_level=1)
        made.append(out.getvalue())
    return made


def _opened(data: list[bytes]) -> list[Any]:
    return [Image.open(io.BytesIO(each)) for each in data]


def _cycle(
    plane: dp.Plane, rows: list[Any], give: Callable[[Any], Any], take: Callable[[Any], Any]
) -> tuple[float, float]:
    """Seconds of a put with `give` of each row, and of a get with `take` of each value."""
    began = time.perf_counter()
    ref = plane.put({"image": [give(each) for each in rows]})
    middle = time.perf_counter()
    values = [take(each) for each in plane.get(ref)["image"].to_list()]
    ended = time.perf_counter()
    assert len(values) == len(rows)
    del values
    plane.free(ref)
    return middle - began, ended - middle


def _same(value: Any) -> Any:
    return value


def kept(scratch: Path) -> list[Row]:
    """Files of images compared with their bytes, and loaded images with `tobytes` and `frombytes`."""
    data = files()
    loaded = _opened(data)
    for image in loaded:
        image.load()
    rows = []

    def image_of(pixels: bytes) -> Any:
        return Image.frombytes("L", (WIDTH, HEIGHT), pixels)

    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch)) as plane:
        for name, raw, give, take in (
            ("files over their bytes", data, _same, _same),
            ("pixels over tobytes() and frombytes()", loaded, Image.Image.tobytes, image_of),
        ):
            puts, gets, both = [], [], []
            for run in range(RUNS + 2):
                images = loaded if raw is loaded else _opened(data)
                if run % 2:  # alternates which is first
                    ours, theirs = _cycle(plane, images, _same, _same), _cycle(plane, raw, give, take)
                else:
                    theirs, ours = _cycle(plane, raw, give, take), _cycle(plane, images, _same, _same)
                if run >= 2:
                    puts.append(theirs[0] / ours[0])
                    gets.append(theirs[1] / ours[1])
                    both.append(sum(theirs) / sum(ours))
            detail = f"{IMAGES} of {sum(map(len, data)) / IMAGES / 1e6:.1f} MB"
            rows.append(row(f"images as {name}, put", puts, at_least=0.8, unit="x", detail=detail))
            rows.append(row(f"images as {name}, get", gets, at_least=0.8, unit="x"))
            rows.append(row(f"images as {name}, both", both, at_least=0.8, unit="x"))
    return rows


def repeated(scratch: Path) -> list[Row]:
    """Responses that each have the image of their prompt in their messages: stored bytes over logical bytes."""
    images = _opened(files())
    messages = [
        [{"role": "user", "content": [{"type": "image", "image": image}]}, {"role": "assistant", "content": f"{i}"}]
        for image in images
        for i in range(RESPONSES)
    ]
    meant = RESPONSES * sum(len(data) for data in files())
    with dp.connect(config=dp.NodeConfig(memory="1GiB", spill_dir=scratch, prewarm=0)) as plane:
        ref = plane.put({"prompt": messages})
        ratio = plane.stats().memory_used / meant * RESPONSES
        assert plane.get(ref[:9])["prompt"].to_list() == messages[:9]
        plane.free(ref)
    return [row(f"{IMAGES} images x {RESPONSES} in messages: stored / meant x 8", [ratio], at_most=1.05, unit="x")]


MEASUREMENTS = [kept, repeated]


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.media", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=[m.__name__ for m in MEASUREMENTS], help="measure only this")
    parser.add_argument("--json", type=Path, default=Path("bench/results/media.json"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        asked = [m for m in MEASUREMENTS if chosen.only is None or m.__name__ in chosen.only]
        rows = measured(asked, Path(scratch))
    return finished(chosen.json, rows, {})


if __name__ == "__main__":
    sys.exit(main())
