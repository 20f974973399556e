"""Images of raw pixels in a mode that PIL can not map, which it takes over when somebody looks at them; and images of
files that were opened once already, which are opened again when somebody does.

PIL keeps such modes in a form of its own, RGB for one: an image is a conversion of all pixels, and memory for them.
Rows that are read for other fields, as those of verl's ranks are, never need it. Until somebody does, an image refers
to the pixels where they lie; its mode, size, format and info need none.

Invariants: `isinstance` and `__class__` say the class that the image has, and `type` does too once its pixels
were looked at; it is pickled, copied, shown and written to as any other. Two threads that look first at once may each
make pixels, as of a file of PIL's that is not loaded yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

Image = Any  # as in `media`

_WAITING = "dataplane.waiting"
"""The attribute that has the data of the pixels, and what makes an image of them."""


def image(kind: Any, like: Image, size: tuple[int, int], data: Any, make: Callable[[Any], Image]) -> Image:
    """An image of a class of PIL with the attributes of another, but of this size and without info. `make` gives a
    plain one of `data` when its pixels are looked at."""
    name = _pixels()
    made = object.__new__(_class(kind, name))
    own = {**vars(like), "_size": size, "info": {}, _WAITING: (data, make)}
    del own[name]
    made.__dict__.update(own)
    return made


def found(image: Image) -> tuple[type[Any], Any] | None:
    """The class and the data of an image that nobody has looked at; None for any other."""
    kind = getattr(type(image), "_deferred_kind", None)
    waiting = vars(image).get(_WAITING)
    return None if kind is None or waiting is None else (kind, waiting[0])


def unopened(kind: Any, make: Callable[[], Image]) -> Image:
    """An image of a class of PIL that `make` gives when somebody looks at anything of it."""
    made = object.__new__(_unopened(kind))
    object.__getattribute__(made, "__dict__")[_WAITING] = make
    return made


class _Unopened:
    """Comes before a class of PIL's until the image was opened."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__class__":
            return object.__getattribute__(self, "_deferred_kind")
        _open(self)
        return getattr(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _open(self)
        setattr(self, name, value)

    def __delattr__(self, name: str) -> None:
        _open(self)
        delattr(self, name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _open(self)
        return self.__reduce_ex__(protocol)


def _open(image: Any) -> None:
    """Have it be the image, of its own class from now on."""
    own = object.__getattribute__(image, "__dict__")
    make, kind = own.get(_WAITING), getattr(type(image), "_deferred_kind", None)
    if make is None or kind is None:  # another thread was sooner
        return
    opened = dict(vars(make()))
    own.update(opened)
    object.__dict__["__class__"].__set__(image, kind)
    own.pop(_WAITING, None)


class _Deferred:
    """Comes before a class of PIL's until there are pixels."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        _load(self)
        return self.__reduce_ex__(protocol)


def _load(image: Any) -> Any:
    """The pixels, in an image that is of its own class from now on."""
    waiting, name = vars(image).get(_WAITING), _pixels()
    if waiting is not None:
        data, make = waiting
        _settle(image, vars(make(data))[name])
    return vars(image)[name]


def _settle(image: Any, pixels: Any) -> None:
    kind = getattr(type(image), "_deferred_kind", None)
    vars(image)[_pixels()] = pixels
    if kind is not None:
        object.__dict__["__class__"].__set__(image, kind)  # past the property of that name
    vars(image).pop(_WAITING, None)


@lru_cache(maxsize=1)
def _pixels() -> str:
    """The attribute of an image that PIL asks for its pixels."""
    from PIL import Image as pil

    return "_im" if isinstance(vars(pil.Image).get("im"), property) else "im"  # since version 11, and before


@lru_cache(maxsize=256)
def _unopened(kind: Any) -> Any:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_deferred_kind": kind}
    return type(kind.__name__, (_Unopened, kind), named)


@lru_cache(maxsize=256)
def _class(kind: Any, name: str) -> Any:
    named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    own = {"_deferred_kind": kind, "__class__": property(lambda _: kind), name: property(_load, _settle)}
    return type(kind.__name__, (_Deferred, kind), named | own)
