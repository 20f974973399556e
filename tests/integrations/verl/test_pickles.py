"""Images of PIL in the pickles of verl's controller: small as their files, and exactly what PIL's own pickle gives."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from PIL import Image, ImageFile

import dataplane as dp
from dataplane.batch import images
from tests.integrations.verl.driving import alone

SIDE = 96
FORMATS = ("BMP", "JPEG", "PNG", "WEBP")
MODES = (*((name, "RGB") for name in FORMATS), ("PNG", "RGBA"), ("PNG", "P"), ("PNG", "I;16"), ("JPEG", "CMYK"))


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    images.pickle_as_pixels()  # what a job of another module left in this process
    before = dict(copyreg.dispatch_table)
    images.pickle_as_files()
    assert copyreg.dispatch_table != before
    yield
    images.pickle_as_pixels()
    assert copyreg.dispatch_table == before


def file(name: str, mode: str = "RGB", **how: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    held = io.BytesIO()
    plain = Image.fromarray(pixels)
    (plain.convert("L").convert(mode) if mode == "I;16" else plain.convert(mode)).save(held, name, **how)
    return held.getvalue()


def by_pil(image: Any) -> bytes:
    """PIL's own pickle of it."""
    images.pickle_as_pixels()
    try:
        return cloudpickle.dumps(image)
    finally:
        images.pickle_as_files()


def said(image: Any) -> tuple[Any, ...]:
    """All that one who is given an image can find."""
    own = {name: value for name, value in vars(image).items() if name not in ("_im", "im", "palette")}
    return type(image), image.mode, image.size, image.format, own, image.getpalette(), image.tobytes()


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_a_lazily_opened_image_is_pickled_as_its_file(name: str, mode: str) -> None:
    data = file(name, mode, dpi=(72, 72)) if name in ("PNG", "JPEG") else file(name, mode)
    expected = pickle.loads(by_pil(Image.open(io.BytesIO(data))))
    image = Image.open(io.BytesIO(data))
    part = {"type": "image", "bytes": data, "image": image}  # as verl's data set makes it of a row
    found = cloudpickle.dumps(part)
    assert len(found) < len(data) + 500, "the file is there once"
    assert getattr(image, "_im", None) is None, "nothing was decoded here"
    there = pickle.loads(found)["image"]
    assert getattr(there, "_im", None) is not None, "several threads may look at it"
    assert said(there) == said(expected)
    assert said(copy.deepcopy(image)) == said(expected)


def loaded(data: bytes) -> Any:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def with_info(data: bytes) -> Any:
    image = Image.open(io.BytesIO(data))
    image.info["uid"] = 7
    return image


def drafted(data: bytes) -> Any:
    image = Image.open(io.BytesIO(data))
    image.draft("L", (SIDE // 2, SIDE // 2))
    return image


def from_disk(data: bytes) -> Any:
    path = Path("image")
    path.write_bytes(data)
    return Image.open(path)


@pytest.mark.parametrize("how", [loaded, with_info, drafted, from_disk])
def test_any_other_image_is_pickled_by_pil(
    how: Callable[[bytes], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = file("JPEG")
    assert cloudpickle.dumps(how(data)) == by_pil(how(data))


def test_an_image_of_several_frames_is_pickled_by_pil() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    held = io.BytesIO()
    frames[0].save(held, "PNG", save_all=True, append_images=frames[1:])
    assert cloudpickle.dumps(Image.open(held)) == by_pil(Image.open(held))


def test_a_truncated_image_fails_on_unpickling_or_is_decoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has told PIL there to take what there is, has not told those who unpickle."""
    data = file("PNG")[: SIDE * SIDE]
    with pytest.raises(OSError, match="truncated"):
        pickle.loads(cloudpickle.dumps(Image.open(io.BytesIO(data))))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    found = cloudpickle.dumps(Image.open(io.BytesIO(data)))
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    assert pickle.loads(found).size == (SIDE, SIDE)


def test_a_foreign_pickle_reducer_of_an_image_class_is_preserved() -> None:
    from PIL.PngImagePlugin import PngImageFile

    def others(image: Any) -> Any:
        return bytes, (b"others",)

    images.pickle_as_pixels()
    copyreg.pickle(PngImageFile, others)
    try:
        images.pickle_as_files()
        assert copyreg.dispatch_table[PngImageFile] is others
        images.pickle_as_pixels()
        assert copyreg.dispatch_table[PngImageFile] is others
    finally:
        del copyreg.dispatch_table[PngImageFile]


def test_the_image_pickles_are_installed_when_a_job_starts() -> None:
    import transfer_queue
    from PIL.PngImagePlugin import PngImageFile

    from dataplane.integrations.verl import plugin

    images.pickle_as_pixels()
    assert plugin.loaded
    with alone(dp.NodeConfig(memory="8MiB", spill=0, prewarm=0)):
        transfer_queue.init({"backend": {"storage_backend": "Dataplane"}})
        assert PngImageFile in copyreg.dispatch_table
        transfer_queue.close()
    assert PngImageFile not in copyreg.dispatch_table
