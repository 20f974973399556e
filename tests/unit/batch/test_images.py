from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageSequence

from dataplane.batch.object_codec import decode_row, encode_rows
from dataplane.errors import Corrupt
from tests.cases import each_case
from tests.unit.batch.pictures import MODES, WIDE, file, is_lazy, noise, opened

_IMAGE = 9  # the extension
_FILES = [
    *(("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")),
    *(("JPEG", mode) for mode in ("L", "RGB", "CMYK")),
    *(("GIF", mode) for mode in ("L", "P", "RGB", "RGBA")),
    *(("TIFF", mode) for mode in ("1", "L", "P", "RGB", "RGBA", "CMYK", "LAB", "YCbCr", "I", "F", "I;16")),
    *(("WEBP", mode) for mode in ("RGB", "RGBA")),
    *(("BMP", mode) for mode in ("1", "L", "P", "RGB")),
    *(("PPM", mode) for mode in ("1", "L", "RGB", "I")),
]


def back(value: Any) -> Any:
    [row] = encode_rows("x", [value])
    return decode_row("x", row)


def same_image(a: Any, b: Any) -> bool:
    return bool(a == b and type(a) is type(b) and a.format == b.format)


@given(
    st.sampled_from((*MODES, *WIDE)),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.integers(0, 99),
    st.dictionaries(st.text("abc", max_size=3), st.integers() | st.binary(max_size=5) | st.tuples(st.floats(0, 1))),
)
def test_an_image_of_any_mode_round_trips(mode: str, size: tuple[int, int], seed: int, info: dict[str, Any]) -> None:
    image = noise(mode, size, seed)
    image.info = info
    found = back(image)
    assert same_image(found, image)
    assert found.convert("L").tobytes() == image.convert("L").tobytes() if mode in ("RGB", "P", "LA", "1") else True
    found.load()
    if 0 not in size:  # it is its owner's, although PIL may have mapped what lies in a message
        found.putpixel((0, 0), 0 if len(found.getbands()) == 1 else (0,) * len(found.getbands()))
    assert same_image(back(image), image)


@each_case(("format", "mode"), _FILES)
def test_an_image_file_that_was_not_loaded_is_stored_unchanged(format: str, mode: str) -> None:
    data = file(noise(mode, (64, 48)), format)
    image = opened(data)
    position = image.fp.tell()
    found = back(image)
    assert is_lazy(image)
    assert image.fp.tell() == position
    assert is_lazy(found)
    assert (found.mode, found.size, found.format) == (image.mode, image.size, format)
    assert same_image(found, image)
    assert found.getexif() == image.getexif()
    [row] = encode_rows("x", [opened(data)])
    assert decode_row("x", row, decode=False) == {"bytes": data, "path": None}


def _animated(format: str) -> bytes:
    frames = [noise("RGB", (40, 30), seed) for seed in range(3)]
    return file(
        frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )


@each_case("format", ["GIF", "TIFF", "PNG"])
@each_case("frame", [0, 2])
@each_case("load", [False, True])
def test_an_animated_image_round_trips_with_all_frames(format: str, frame: int, load: bool) -> None:
    image = opened(_animated(format))
    image.seek(frame)
    if load:
        image.load()
    found = back(image)
    assert found.tell() == frame
    assert found == image
    assert found.n_frames == image.n_frames == 3
    pairs = zip(ImageSequence.Iterator(found), ImageSequence.Iterator(image), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def forged(**changed: Any) -> bytes:
    image = noise("P", (6, 4))
    fields = {
        "module": "PIL.Image",
        "kind": "Image",
        "mode": "P",
        "size": (6, 4),
        "frame": -1,
        "format": None,
        "palette": ("RGB", b"abc"),
        "info": {"a": 1},
        "rest": (),
        "data": image.tobytes(),
    } | changed
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(_IMAGE, msgspec.msgpack.encode(list(fields.values()))))


_PNG = {"module": "PIL.PngImagePlugin", "kind": "PngImageFile", "mode": "RGB", "size": (32, 24), "frame": 0}
_BYTES = file(noise("RGB"))


@each_case(
    "changed",
    [
        {"size": (6, 5)}, {"size": (-6, -4)}, {"size": (1 << 40, 1 << 40)}, {"size": (0, 4)}, {"mode": "RGB"},
        {"mode": "XYZ"}, {"mode": "I;16", "size": (6, 2), "palette": ("RGB", b"abc")},
        {"palette": ("XYZ", b"abc")}, {"palette": ("RGB", b"x" * 10_000)}, {"info": [1]}, {"data": 3},
        {"data": -1}, {"frame": 1}, {"module": "subprocess", "kind": "Popen"},
        {"module": "PIL.ImageShow", "kind": "Viewer"}, {"module": "PIL.Image", "kind": "Exif"},
        {"module": "PIL.PngImagePlugin", "kind": "PngStream"}, {"module": "PIL.PngImagePlugin", "kind": "io"},
        {"module": "PIL.os", "kind": "path"},
        {"module": "PIL.EpsImagePlugin", "kind": "EpsImageFile", "frame": 0}, {**_PNG, "data": _BYTES[:20]},
        {**_PNG, "data": b""}, {**_PNG, "data": file(noise("RGB"), "GIF")},
        {**_PNG, "data": file(noise("RGB", (32, 25)))}, {**_PNG, "data": file(noise("L"))},
        {**_PNG, "data": _BYTES, "frame": 7},
    ],
    ids=lambda changed: str(changed)[:60],
)  # fmt: skip
def test_invalid_image_data_is_corrupt(changed: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode_row("x", forged(**{"palette": None, **changed}))


def test_a_file_that_claims_too_many_pixels_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file(noise("RGB"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Corrupt, match="pixels"):
        decode_row("x", forged(**_PNG, palette=None, data=data))
