"""Reads the values of a reference page by page, for checkpoints."""

from __future__ import annotations

from collections.abc import Callable

from dataplane.batch.batch import Batch
from dataplane.batch.ref import BatchRef
from dataplane.errors import Freed, LimitExceeded, OwnerDied
from dataplane.integrations.process import with_plane

_PAGE_BYTES = 32 << 20

#: Takes a page: the positions of its rows in the reference, and the rows.
Write = Callable[[slice, Batch], None]
Lost = Callable[[], None]


def read_pages(ref: BatchRef, timeout: float, write: Write, lost: Lost | None = None) -> None:
    """Call `write` with pages of about 32 MiB, one after the other. A page that cannot be read at once is read in
    smaller ones: of fewer rows, and of one row column by column.

    timeout: seconds to wait for room for a page.
    lost: called for each value that was freed, or whose node has died. None: raises Freed, OwnerDied.

    Raises LimitExceeded (a single value does not fit), and as `Plane.get`.
    """
    step = max(1, _PAGE_BYTES * len(ref) // max(1, ref.nbytes))
    for start in range(0, len(ref), step):
        _page(ref[start : start + step], start, timeout, write, lost)


def _page(ref: BatchRef, start: int, timeout: float, write: Write, lost: Lost | None) -> None:
    try:
        batch = with_plane(lambda plane: plane.get(ref, timeout=timeout))
    except (Freed, OwnerDied, LimitExceeded) as error:
        too_large = isinstance(error, LimitExceeded)
        if lost is None and not too_large:
            raise
        if len(ref) > 1:
            half = len(ref) // 2
            _page(ref[:half], start, timeout, write, lost)
            _page(ref[half:], start + half, timeout, write, lost)
        elif len(ref.columns) > 1:
            for name in ref.columns:
                _page(ref.select(name), start, timeout, write, lost)
        elif lost is None or too_large:
            raise
        else:
            lost()
        return
    write(slice(start, start + len(ref)), batch)
