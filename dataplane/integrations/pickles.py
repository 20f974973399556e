"""Images of PIL in pickles: one that was opened from a file in memory is pickled as that file.

verl's controller opens the images of its prompts and has Ray pickle them for its agent loops, before any call of
storage. PIL pickles pixels: it decodes each image in the controller, and keeps it decoded; the pickle has all pixels,
and the file beside them, which the prompt has too. So the controller takes, of each image, three to four times its
pixels. As files, a pickle has each file once, also where the prompt has its bytes.

Invariants: what is unpickled is what PIL's own pickle gives, and decoded: verl's agent loops look at an image
from several threads, and PIL decodes in one alone. An image that was loaded, changed, or opened from anything else is
pickled as PIL does it.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from contextlib import suppress
from typing import Any

from dataplane.batch import media

_KINDS = {
    "PIL.BmpImagePlugin": "BmpImageFile",
    "PIL.JpegImagePlugin": "JpegImageFile",
    "PIL.PngImagePlugin": "PngImageFile",
    "PIL.WebPImagePlugin": "WebPImageFile",
}


def install_for_verl() -> None:
    """Do so in this process, where verl and PIL are there and nobody else has said how to. Idempotent."""
    if "verl" not in sys.modules:
        return
    with suppress(ImportError):
        for module, name in _KINDS.items():
            kind = getattr(importlib.import_module(module), name)
            if kind not in copyreg.dispatch_table:
                copyreg.pickle(kind, _reduced)


def uninstall() -> None:
    """Undo it. Idempotent."""
    for kind in [kind for kind, how in copyreg.dispatch_table.items() if how is _reduced]:
        del copyreg.dispatch_table[kind]


def _reduced(image: Any) -> Any:
    from PIL import ImageFile

    found = None if ImageFile.LOAD_TRUNCATED_IMAGES else media.opened_from(image)  # who unpickles may not be told that
    return image.__reduce_ex__(4) if found is None else (media.reopened, found)
