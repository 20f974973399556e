from __future__ import annotations

import contextlib
import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageSequence, PngImagePlugin

from dataplane.batch.batch import Column
from dataplane.batch.objects import decode_row, encode_rows
from dataplane.errors import Corrupt, SchemaMismatch
from tests.cases import each_case
from tests.unit.batch.exact import column
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
def test_an_image_of_any_mode_comes_back(mode: str, size: tuple[int, int], seed: int, info: dict[str, Any]) -> None:
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
def test_a_file_that_was_not_loaded_is_kept_as_it_is(format: str, mode: str) -> None:
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


@each_case(("format", "mode"), _FILES)
def test_a_file_that_was_loaded_comes_back_with_its_class(format: str, mode: str) -> None:
    image = opened(file(noise(mode, (20, 10)), format))
    image.load()
    image.putpixel((1, 1), image.getpixel((0, 0)))
    assert same_image(back(image), image)


def test_what_was_said_of_an_image_comes_back() -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("note", "hello")
    text.add_itxt("lang", "grüße", "de", "Gruß")
    exif = Image.Exif()
    exif[0x010E] = "a picture"
    image = opened(file(noise("RGB"), pnginfo=text, dpi=(72, 72), exif=exif, icc_profile=b"i" * 9000))
    image.info["added"] = (1, {"a": 2})
    image.info.pop("dpi")
    found = back(image)
    assert found.info == image.info
    assert type(found.info["lang"]) is type(image.info["lang"])
    assert found.info["lang"].lang == "de"
    assert same_image(found, image)
    image.load()
    found.load()
    assert found.text == image.text
    image.info["handler"] = print  # what no row holds is left out
    assert "handler" not in back(image).info
    image = opened(file(noise("RGB")))
    image.format = "OTHER"
    image.load()
    assert back(image).format == "OTHER"


def _animated(format: str) -> bytes:
    frames = [noise("RGB", (40, 30), seed) for seed in range(3)]
    return file(
        frames[0], format, save_all=True, append_images=frames[1:], **({"lossless": True} if format == "WEBP" else {})
    )


@each_case("format", ["GIF", "TIFF", "PNG"])
@each_case("frame", [0, 2])
@each_case("load", [False, True])
def test_an_image_of_frames_keeps_all_of_them(format: str, frame: int, load: bool) -> None:
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


class _Own(Image.Image):
    pass


def test_what_is_no_image_of_pils_is_refused() -> None:
    own = _Own()
    with pytest.raises(SchemaMismatch, match=r"_Own.*put image.copy\(\)"):
        encode_rows("x", [own])
    closed = opened(file(noise("RGB")))
    closed.close()
    with pytest.raises(SchemaMismatch, match="does not load"):
        encode_rows("x", [closed])
    with pytest.raises(SchemaMismatch, match="does not load"):
        cut = opened(file(noise("RGB", (90, 90)), "PCX")[:300])
        encode_rows("x", [cut])


def test_images_are_handed_as_the_bytes_of_files() -> None:
    data = file(noise("RGB", (90, 90)), "JPEG")
    rows = [{"image": opened(data)}, {"image": noise("LA")}, {"image": noise("CMYK")}]
    kept, grey, cmyk = [row["image"] for row in column(rows).to_list(decode=False)]
    assert kept == {"bytes": data, "path": None}
    assert opened(grey["bytes"]).tobytes() == rows[1]["image"].tobytes()
    assert opened(grey["bytes"]).format == "PNG"
    assert opened(cmyk["bytes"]).tobytes() == rows[2]["image"].tobytes()
    with pytest.raises(Corrupt, match="HSV"):
        column([noise("HSV")]).to_list(decode=False)


def test_pil_is_not_imported_where_there_is_no_image() -> None:
    code = (
        "import sys\nfrom dataplane.batch.objects import decode_row, encode_rows\n"
        "decode_row('x', encode_rows('x', [{'a': (1, {2})}])[0])\nprint('PIL' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "False"


# Forged


def forged(**changed: Any) -> bytes:
    """A row of an image with these fields changed."""
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
        {"size": (6, 5)},
        {"size": (-6, -4)},
        {"size": (1 << 40, 1 << 40)},
        {"size": (0, 4)},
        {"mode": "RGB"},
        {"mode": "XYZ"},
        {"mode": "I;16", "size": (6, 2), "palette": ("RGB", b"abc")},
        {"palette": ("XYZ", b"abc")},
        {"palette": ("RGB", b"x" * 10_000)},
        {"info": [1]},
        {"data": 3},
        {"data": -1},
        {"frame": 1},
        {"module": "subprocess", "kind": "Popen"},
        {"module": "PIL.ImageShow", "kind": "Viewer"},
        {"module": "PIL.Image", "kind": "Exif"},
        {"module": "PIL.PngImagePlugin", "kind": "PngStream"},
        {"module": "PIL.PngImagePlugin", "kind": "io"},
        {"module": "PIL.os", "kind": "path"},
        {"module": "PIL.EpsImagePlugin", "kind": "EpsImageFile", "frame": 0},
        {**_PNG, "data": _BYTES[:20]},
        {**_PNG, "data": b""},
        {**_PNG, "data": file(noise("RGB"), "GIF")},
        {**_PNG, "data": file(noise("RGB", (32, 25)))},
        {**_PNG, "data": file(noise("L"))},
        {**_PNG, "data": _BYTES, "frame": 7},
    ],
    ids=lambda changed: str(changed)[:60],
)
def test_what_is_no_image_is_corrupt(changed: dict[str, Any]) -> None:
    with pytest.raises(Corrupt):
        decode_row("x", forged(**{"palette": None, **changed}))


def test_a_file_that_claims_too_many_pixels_is_corrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    data = file(noise("RGB"))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(Corrupt, match="pixels"):
        decode_row("x", forged(**_PNG, palette=None, data=data))


@given(st.data())
def test_an_image_with_wrong_bytes_is_corrupt_or_another(data: st.DataObject) -> None:
    images = [noise("RGB", (8, 8)), noise("P", (8, 8)), opened(file(noise("L", (8, 8))))]
    [row] = encode_rows("x", [data.draw(st.sampled_from(images))])
    raw = bytearray(row)
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(Corrupt, SchemaMismatch):
        decode_row("x", bytes(raw))


@each_case("opened_once", [False, True])
def test_pixels_that_pil_converts_are_taken_over_when_somebody_looks(opened_once: bool) -> None:
    image = noise("RGB", (64, 64))
    if opened_once:  # then it is of a class of files
        image = opened(file(image))
        image.load()
    image.info["note"] = 1
    looks: dict[str, Callable[[Any], Any]] = {
        "bytes": lambda found: found.tobytes(),
        "array": lambda found: np.asarray(found).tobytes(),
        "pickle": lambda found: pickle.loads(pickle.dumps(found)),
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "resize": lambda found: found.resize((8, 8)),
        "pixel": lambda found: found.getpixel((3, 3)),
        "core": lambda found: found.im.size,
        "load": lambda found: found.load()[5, 5],
        "save": lambda found: file(found),
        "bounds": lambda found: found.getbbox(),
    }
    for name, look in looks.items():
        found = back(image)
        assert is_deferred(found)
        assert isinstance(found, type(image))
        assert found.__class__ is type(image)
        told = found.mode, found.size, found.format, found.info, found.getbands(), found.width
        assert told == (image.mode, image.size, image.format, image.info, image.getbands(), image.width)
        assert is_deferred(found)
        assert look(found) == look(image), name
        assert type(found) is type(image), name
        assert not [key for key in vars(found) if key.startswith("dataplane")], name
        assert same_image(found, image), name


def test_rows_that_are_the_same_memory_have_the_same_bytes() -> None:
    data = file(noise("RGB", (64, 64)))
    rows = [{"image": opened(data), "bytes": [b"x" * 9000]}, {"image": opened(data[:-1] + b"x"), "bytes": []}]
    whole = column(rows)
    [one, other, again] = Column.of("x", whole.field, whole._selections, np.array([0, 1, 0])).to_list()
    assert one["bytes"][0] is again["bytes"][0]
    assert one["bytes"] == [b"x" * 9000]
    assert one["image"].fp.getvalue() == again["image"].fp.getvalue() == data
    assert other["image"].fp.getvalue() == data[:-1] + b"x"
    one["image"].putpixel((0, 0), (1, 2, 3))
    assert again["image"] == opened(data)


def is_deferred(image: Any) -> bool:
    return type(image) is not image.__class__
