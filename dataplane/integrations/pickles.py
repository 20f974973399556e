"""PIL images in pickles: an image that was opened from a file in memory is pickled as that file.

verl's controller opens the images of its prompts, and Ray pickles them for the agent loops before anything is stored.
PIL pickles pixels: it decodes each image in the controller and keeps it decoded, and the pickle has all pixels in
addition to the file, which the prompt contains too. So each image takes three to four times the memory of its pixels in
the controller. If images are pickled as files, a pickle has each file once, even if the prompt has its bytes.

Invariants: an unpickled image equals that of PIL's own pickle, and is decoded: verl's agent loops use an image from
several threads, and PIL's decoding is not thread-safe. An image that was loaded, changed, or opened from anything
else is pickled as by PIL.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from contextlib import suppress
from typing import Any

from dataplane.batch import images

_KINDS = {
    "PIL.BmpImagePlugin": "BmpImageFile",
    "PIL.JpegImagePlugin": "JpegImageFile",
    "PIL.PngImagePlugin": "PngImageFile",
    "PIL.WebPImagePlugin": "WebPImageFile",
}


def install_for_verl() -> None:
    """Install this in this process if verl and PIL are imported and no other code has replaced the pickling.
    Idempotent."""
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

    found = (
        None if ImageFile.LOAD_TRUNCATED_IMAGES else images.opened_from(image)
    )  # the unpickling process may have another setting
    return image.__reduce_ex__(4) if found is None else (images.reopened, found)
