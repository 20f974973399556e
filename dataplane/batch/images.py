"""Encodes PIL images: as the bytes of their file if they still have it, else as their pixels. In both cases the reader
gets an image equal to the one that was put.

An image that was opened and not loaded since is stored as its file's bytes. The reader opens the file again, so nothing
is decoded before pixels are accessed. Any other image is stored as raw pixels, with its palette. PIL maps them in place
where it can, and otherwise copies them at the first access. Both forms keep class, mode, size, format and `info`. The
name and position of an open file are lost, and so are attributes that PIL's own pickling loses too.

An image of several frames is stored as its file's bytes and the number of the current frame, even if it was loaded. If
it was changed, or its file is closed, it is refused, since its pixels are those of one frame only.

The reader creates instances only of PIL's own classes, and opens only files of a few formats (for some others PIL runs
a program). It checks the number of bytes of pixels before it uses them, and raises ValueError if the bytes are not the
image described. PIL's errors for files that claim too many pixels, or end early, become ValueError for the header; for
pixels, the user gets them at the first access. PIL is imported only for a row with an image.

PIL stores some modes, such as RGB, in a layout of its own, so it cannot map their pixels: to create such an image, it
allocates memory and converts all of them. So an image of such a mode is created with a reference to the stored pixels,
which are converted at the first access. A process that reads such rows for other fields, as verl's ranks do, never
converts them. Before the first access, `isinstance` and `__class__` give the class of the image, and `type` gives a
subclass; afterwards `type` gives the class too. The image can be pickled, copied, shown and modified like any other. If
two threads make the first access at the same time, each may convert the pixels, as with a PIL file that is not loaded
yet.
"""

from __future__ import annotations

import copyreg
import importlib
import io
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import msgspec

from dataplane.batch.builtin_codec import Unfit
from dataplane.batch.object_rows import LARGE

Image = Any  # PIL is an extra, so annotations must not need it

_FORMATS = frozenset(("PNG", "JPEG", "MPO", "GIF", "WEBP", "TIFF", "BMP", "DIB", "PPM", "JPEG2000", "AVIF"))
_BITS = {
    "1": 1,
    **dict.fromkeys(("L", "P"), 8),
    **dict.fromkeys(("LA", "La", "PA", "I;16", "I;16L", "I;16B", "I;16N"), 16),
    **dict.fromkeys(("RGB", "YCbCr", "LAB", "HSV"), 24),
    **dict.fromkeys(("RGBA", "RGBa", "RGBX", "CMYK", "I", "F"), 32),
}
_PALETTES = frozenset(("P", "PA"))
_MOST_COLORS = 256
_WAITING = "dataplane.waiting"
"""The attribute of a deferred image with the stored pixels, and the function that makes a plain image of them."""

_PLAIN = ("PIL.Image", "Image")
_FRAMES = "put it as it was opened, or its frames: [frame.copy() for frame in PIL.ImageSequence.Iterator(image)]"


class Picture(msgspec.Struct, array_like=True, frozen=True):
    """An image as it is stored. `data`: the bytes of its file or its pixels; in a row, it may be the number of a part.
    `frame`: the number of the frame in the file; negative for pixels. `rest`: the keys of the info that are not stored,
    because the file has their values."""

    module: str
    kind: str
    mode: str
    size: tuple[int, int]
    frame: int
    format: str | None
    palette: tuple[str, bytes] | None
    info: msgspec.Raw
    rest: tuple[str, ...]
    data: bytes | int


def is_image(value: object) -> bool:
    """Whether the value is an image of PIL. False if PIL was never imported."""
    kind = getattr(sys.modules.get("PIL.Image"), "Image", None)
    return kind is not None and isinstance(value, kind)


def taken(image: Image) -> Picture:
    """The stored form of the image, without its info. Loads the image if necessary. Raises Unfit if it has none."""
    kind, pixels = _deferred_from(image) or (type(image), None)
    module, name = kind.__module__, kind.__qualname__
    if not module.startswith("PIL.") or getattr(sys.modules.get(module), name, None) is not kind:
        raise Unfit(f"an image of {module}.{name}", "put image.copy()")
    data = None if pixels is not None or (module, name) == _PLAIN else _file(image)
    if data is None and pixels is None:
        if _frames(image) > 1:
            raise Unfit(f"a {image.format} of several frames that is no longer as in its file", _FRAMES)
        try:
            image.load()
        except (OSError, ValueError, SyntaxError, EOFError, AttributeError, AssertionError) as error:
            raise Unfit(f"an image that does not load ({error})", "open it again") from error
        if image.mode not in _BITS:
            raise Unfit(f"an image of the mode {image.mode}", "put image.convert('RGB')")
    frame = -1 if data is None else int(image.tell())
    palette = _palette(image, lazy=data is not None) if image.mode in _PALETTES else None
    own = vars(image).get("format")  # the class's, unless it was set
    data = pixels if pixels is not None else image.tobytes() if data is None else data
    return Picture(module, name, image.mode, image.size, frame, own, palette, msgspec.Raw(), (), data)


def made(picture: Picture, info: Mapping[Any, Any], data: Any) -> Image:
    """The image with this info. `data`: the bytes of its file, or its pixels. Raises ValueError for invalid data."""
    from PIL import Image as pil

    if picture.frame < 0 and picture.mode not in _BITS:
        raise ValueError(f"no image has the mode {picture.mode!r}")
    if picture.palette is not None and len(picture.palette[1]) > 4 * _MOST_COLORS:
        raise ValueError(f"a palette of {len(picture.palette[1])} bytes")
    kind = _class(picture.module, picture.kind)
    if picture.frame >= 0:
        return _opened(picture, kind, info, data)
    if is_deferred(picture.frame, picture.mode, len(data)):
        _check(picture, data)
        size, make = picture.size, partial(_plain, picture.mode, picture.size)
        image = _deferred_image(kind, _like(picture.mode, kind), size, data, make)
    else:
        image = _pixels(picture, data)
        if kind is not pil.Image:
            image = _as(kind, image)
    image.info = dict(info)
    if picture.format is not None:
        image.format = picture.format
    return image


def is_deferred(frame: int, mode: str, nbytes: int) -> bool:
    """Whether an image of this frame, mode and size of `data` refers to its stored pixels until they are accessed."""
    from PIL import Image as pil

    mapped = getattr(pil, "_MAPMODES", ())
    return frame < 0 and nbytes >= LARGE and mode not in _PALETTES and mode not in mapped


def as_file(image: Image) -> bytes:
    """The image as the bytes of a lossless file: PNG, or TIFF for modes that PNG lacks. Raises ValueError."""
    file = io.BytesIO()
    try:
        image.save(file, "PNG" if image.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16") else "TIFF")
    except (OSError, KeyError) as error:
        raise ValueError(f"no file of an image of the mode {image.mode}: {error}") from error
    return file.getvalue()


# Taken


def _header(image: Image) -> tuple[Any, ...]:
    """The properties that an image has before it is loaded."""
    return image.mode, image.size, image.info, _palette(image, lazy=True), image.tell()


def _file(image: Image) -> Any:
    """The bytes of the image's file; None if the image was changed or loaded, or has no file of a known format. One of
    several frames still has its file when it is loaded; raises Unfit if it was changed."""
    if image.format not in _FORMATS:
        return None
    if not _is_loaded(image):
        changed = getattr(image, "decoderconfig", ()) or getattr(image, "_reduce", 0)  # a draft, in fewer pixels
        return None if changed else _read(getattr(image, "fp", None))
    if vars(image).get("n_frames") == 1:
        return None
    # PIL keeps a file of several frames open. For one frame it is unknown whether pixels were changed.
    data = _read(getattr(image, "_fp", None))
    if data is None or (found := _frame_of(data, image)) is None:
        return None
    if found.mode != image.mode or found.getpalette() != image.getpalette() or found.tobytes() != image.tobytes():
        raise Unfit(f"a {image.format} of several frames that was changed", _FRAMES)
    return data


def _is_loaded(image: Image) -> bool:
    own = vars(image)
    return own.get("_im", own.get("im")) is not None


def _frame_of(data: Any, image: Image) -> Image | None:
    """The image's current frame, loaded from the file again; None if the file has only one frame, or another image."""
    try:
        found = _open(data, image.format)
        if type(found) is not type(image) or getattr(found, "n_frames", 1) == 1:
            return None
        found.seek(image.tell())
        found.load()
    except (OSError, ValueError, SyntaxError, EOFError):
        return None
    return found


def _read(file: Any) -> Any:
    """All bytes of an open file; None if it cannot be read. The position in the file does not change."""
    try:
        if type(file) is io.BytesIO:
            return file.getvalue()  # which copies nothing
        position = file.tell()
        file.seek(0)
        try:
            data = file.read()
        finally:
            file.seek(position)
    except (OSError, ValueError, AttributeError):  # closed, not seekable, or no file
        return None
    return data if type(data) is bytes and data else None


def _frames(image: Image) -> int:
    """The number of frames; 1 if it is unknown for a loaded image, since PIL may drop loaded pixels to count them."""
    own = vars(image)
    known = own.get("n_frames", own.get("_n_frames"))
    if known is None and not _is_loaded(image):
        try:
            known = getattr(image, "n_frames", 1)
        except (OSError, ValueError, EOFError, AttributeError, AssertionError, SyntaxError):  # its file is closed
            known = 1
    return int(known or 1)


def _palette(image: Image, *, lazy: bool) -> tuple[str, bytes] | None:
    """The palette of the image, as its mode and bytes; None without one. `lazy`: read it from `image.palette`, which
    does not load the image."""
    if lazy:
        own = image.palette
        return None if own is None else (own.rawmode or own.mode, bytes(own.palette))
    mode = image.im.getpalettemode()
    return mode, image.im.getpalette(mode, mode)


# Made


@lru_cache(maxsize=256)
def _class(module: str, name: str) -> Any:
    from PIL import Image as pil
    from PIL import _plugins

    if (module, name) == _PLAIN:
        return pil.Image
    package, _, plugin = module.partition(".")
    if package != "PIL" or plugin not in _plugins:
        raise ValueError(f"{module} is no module of PIL's images")
    from PIL import ImageFile

    kind = vars(importlib.import_module(module)).get(name)
    if not isinstance(kind, type) or not issubclass(kind, ImageFile.ImageFile):
        raise ValueError(f"{module}.{name} is no class of PIL's images")
    return kind


def _open(data: Any, format: str) -> Image:
    from PIL import Image as pil

    return pil.open(io.BytesIO(data), formats=("JPEG" if format == "MPO" else format,))  # PIL finds out which of both


def _opened(picture: Picture, kind: Any, info: Mapping[Any, Any], data: Any) -> Image:
    format = getattr(kind, "format", None)
    if format not in _FORMATS:
        raise ValueError(f"{format} is no format of a file that is kept")
    try:
        image = _open(bytes(data), format)
        if picture.frame:
            image.seek(picture.frame)
    except Exception as error:  # PIL's parsers may raise any error for untrusted bytes
        raise ValueError(f"no {format} that PIL opens here: {error}") from error
    if type(image) is not kind or image.mode != picture.mode or image.size != picture.size:
        raise ValueError(f"a file of {image.mode} {image.size}, not of {picture.mode} {picture.size}")
    if picture.palette is not None and picture.palette != _palette(image, lazy=True):
        image.putpalette(picture.palette[1], picture.palette[0])
    kept = {key: image.info[key] for key in picture.rest if key in image.info}
    image.info.clear()  # the same dict: PIL adds to it when it loads
    image.info.update(kept | dict(info))
    return image


def _pixels(picture: Picture, data: Any) -> Image:
    """An image of raw pixels, over their memory if PIL supports that."""
    from PIL import Image as pil

    _check(picture, data)
    mode = picture.mode
    image = _plain(mode, picture.size, data) if len(data) else pil.new(mode, picture.size)
    if picture.palette is not None:
        if mode not in _PALETTES:
            raise ValueError(f"a palette of an image of {mode}")
        image.putpalette(picture.palette[1], picture.palette[0])
    return image


def _check(picture: Picture, data: Any) -> None:
    (width, height), mode = picture.size, picture.mode
    if min(width, height) < 0 or (width * _BITS[mode] + 7) // 8 * height != len(data):
        raise ValueError(f"{len(data)} bytes are no image of {mode} {picture.size}")


def _plain(mode: str, size: tuple[int, int], data: Any) -> Image:
    from PIL import Image as pil

    return pil.frombuffer(mode, size, data, "raw", mode, 0, 1)


@lru_cache(maxsize=256)
def _like(mode: str, kind: Any) -> Image:
    from PIL import Image as pil

    plain = pil.new(mode, (1, 1))
    return plain if kind is pil.Image else _as(kind, plain)


def _as(kind: Any, plain: Image) -> Image:
    """A plain image as an image of the file class `kind`, loaded and with its file closed, as PIL unpickles one."""
    image = kind.__new__(kind)
    image.__dict__.update(vars(plain))
    image.tile = []
    image.fp = None
    image.filename = ""
    return image


# Deferred


def _deferred_image(kind: Any, like: Image, size: tuple[int, int], data: Any, make: Callable[[Any], Image]) -> Image:
    """An image of the PIL class `kind` with the attributes of `like`, except for its size and its info, which is empty.
    When its pixels are accessed, `make` creates a plain image from `data`."""
    name = _pixels_name()
    made = object.__new__(_deferred_class(kind, name))
    own = {**vars(like), "_size": size, "info": {}, _WAITING: (data, make)}
    del own[name]
    made.__dict__.update(own)
    return made


def _deferred_from(image: Image) -> tuple[type[Any], Any] | None:
    """The class and the stored pixels of an image whose pixels were not accessed yet; None for any other image."""
    kind = getattr(type(image), "_deferred_kind", None)
    waiting = vars(image).get(_WAITING)
    return None if kind is None or waiting is None else (kind, waiting[0])


class _Deferred:
    """The mixin of a deferred image, in front of its PIL class, until the image has pixels."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _load(self)
        return self.__reduce_ex__(protocol)


def _load(image: Any) -> Any:
    """The pixels of the image. If they are still to be created, the image then changes to its own class."""
    waiting, name = vars(image).get(_WAITING), _pixels_name()
    if waiting is not None:
        data, make = waiting
        _settle(image, vars(make(data))[name])
    return vars(image)[name]


def _settle(image: Any, pixels: Any) -> None:
    kind = getattr(type(image), "_deferred_kind", None)
    vars(image)[_pixels_name()] = pixels
    if kind is not None:
        object.__dict__["__class__"].__set__(image, kind)  # bypasses the property of that name
    vars(image).pop(_WAITING, None)


@lru_cache(maxsize=1)
def _pixels_name() -> str:
    """The name of the attribute in which PIL looks for an image's pixels."""
    from PIL import Image as pil

    return "_im" if isinstance(vars(pil.Image).get("im"), property) else "im"  # since version 11, and before


@lru_cache(maxsize=256)
def _deferred_class(kind: Any, name: str) -> Any:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = {"_deferred_kind": kind, "__class__": property(lambda _: kind), name: property(_load, _settle)}
    return type(kind.__name__, (_Deferred, kind), named | own)


# In pickles
#
# PIL pickles pixels: it decodes an image and keeps it decoded, and the pickle has all pixels in addition to the file.
# An image that was opened from a file in memory is pickled as this file instead. A pickle that has the same bytes
# elsewhere stores them once.
#
# Invariants: an unpickled image equals that of PIL's own pickle, and is decoded, since PIL's decoding is not
# thread-safe. An image that was loaded, changed, or opened from anything else is pickled as by PIL.

_PICKLED = {
    "PIL.BmpImagePlugin": "BmpImageFile",
    "PIL.JpegImagePlugin": "JpegImageFile",
    "PIL.PngImagePlugin": "PngImageFile",
    "PIL.WebPImagePlugin": "WebPImageFile",
}


def pickle_as_files() -> None:
    """Pickle images as their files in this process, if PIL is installed. Classes whose pickling other code has replaced
    are left alone. Idempotent."""
    with suppress(ImportError):
        for module, name in _PICKLED.items():
            kind = getattr(importlib.import_module(module), name)
            if kind not in copyreg.dispatch_table:
                copyreg.pickle(kind, _reduced)


def pickle_as_pixels() -> None:
    """Undo `pickle_as_files`. Idempotent."""
    for kind in [kind for kind, how in copyreg.dispatch_table.items() if how is _reduced]:
        del copyreg.dispatch_table[kind]


def _reduced(image: Any) -> Any:
    from PIL import ImageFile

    found = None if ImageFile.LOAD_TRUNCATED_IMAGES else _opened_from(image)  # may differ in the reader
    return image.__reduce_ex__(4) if found is None else (_reopened, found)


def _opened_from(image: Image) -> tuple[str, bytes] | None:
    """The format and the bytes of the file from which an image was opened. None unless the file is in memory and has
    one frame, and the image was neither loaded nor changed since."""
    if type(vars(image).get("fp")) is not io.BytesIO or _is_loaded(image) or getattr(image, "n_frames", 1) > 1:
        return None
    data, name = _file(image), image.format
    try:
        again = None if data is None else _open(data, name)
    except (OSError, ValueError, SyntaxError, EOFError):
        return None
    if type(again) is not type(image) or _header(again) != _header(image):
        return None
    return name, data


def _reopened(name: str, data: bytes) -> Image:
    """The image in a file of this format, loaded and with its file closed, as PIL's own pickle would restore it."""
    image = _open(data, name)
    made = object.__new__(type(image))
    made.__setstate__(image.__getstate__())
    return made
