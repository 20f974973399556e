"""References to parts of rows, made of references, and what is to be read for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dataplane.batch import cutfields, cuts
from dataplane.batch.cuts import Cut, Step
from dataplane.batch.frame import Place
from dataplane.batch.rows import Rows
from dataplane.errors import Misuse

if TYPE_CHECKING:
    from dataplane.batch.ref import BatchRef, ShardKey


def sliced(ref: BatchRef, names: str | Sequence[str], axis: int, step: Step) -> BatchRef:
    """The reference, of whose columns of these names one more step is made along the dimension `axis` of rows. Raises
    SchemaMismatch, Misuse."""
    places, frames = dict(ref._columns), list(ref._frames)
    chosen: dict[tuple[int, int], dict[str, None]] = {}
    for name in [names] if isinstance(names, str) else names:
        field, frame, _ = ref._require(name)
        chosen.setdefault((frame, cutfields.axis_of(name, field, axis)), {})[name] = None
    for (number, at), together in chosen.items():
        whole = ref._frames[number]
        if at and whole.bounds is not None:
            raise Misuse(
                f"column {next(iter(together))!r} was made piece by piece: its rows are sliced along axis 0 alone"
            )
        sizes = {cutfields.size_of(places[name].field, at) for name in together}
        own = step._replace(axis=at, size=sizes.pop() if len(sizes) == 1 else 0)
        for slot, name in enumerate(together):
            places[name] = Place(cutfields.cut_field(name, places[name].field, own), len(frames), slot)
        cut = cuts.added(whole.cut, own) if len(ref) else whole.cut
        frames.append(whole.pick([ref._columns[name].slot for name in together]).with_cut(cut))
    found = type(ref)(len(ref), places, tuple(frames), ref._origin, ref.traces)
    return found.select(*places)  # without the frames and slots that nothing is in any more


def wanted(ref: BatchRef) -> dict[ShardKey, list[tuple[tuple[int, ...], Rows, Cut]]]:
    """As `BatchRef.footprint`, and what of each row is meant: rows, ascending, twice where they are meant in two
    ways."""
    found: dict[ShardKey, list[tuple[tuple[int, ...], Rows, Cut]]] = {}
    for frame in ref._frames:
        for cells, rows, cut in frame.wanted():
            ordinals: dict[ShardKey, set[int]] = {}
            for cell in cells:
                ordinals.setdefault(cell.shard[:2], set()).add(cell.ordinal)
            for key, chosen in ordinals.items():
                found.setdefault(key, []).append((tuple(sorted(chosen)), rows, cut))
    return found
