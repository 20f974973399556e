"""The owners of the rows of a store's shards: the clients that put them, and the clients that retained some.

Most shards have one owner and no `links`. The first retain of a shard creates its `links` (`store.links`). They are
removed when the client that put the shard is the only owner again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dataplane.batch.locations import link_of, linked, shard_of
from dataplane.batch.rows import RowIndices
from dataplane.errors import Corrupt, LimitExceeded
from dataplane.store.links import Links, Selected
from dataplane.store.shard import Shard
from dataplane.store.shards import Shards

_LINKS = 64 << 20  # the most bytes of the owner records of shards with several owners


class RowOwners:
    """The owners of the rows of one store's shards."""

    def __init__(self, shards: Shards, free: Callable[[Iterable[int]], None]) -> None:
        """`free`: frees shards and links by number (`Store.free`)."""
        self._shards = shards
        self._free = free
        self.nbytes = 0
        """The approximate bytes of the owner records of shards with several owners."""
        self.retained: Callable[[int, Selected], None] = lambda number, selected: None
        """Called with the number of each new link and the cells that were retained under it."""

    def put_by(self, number: int) -> tuple[str, str] | None:
        """The client and the scope of the shard's put; for a link, the client that created it, and an empty scope.
        None if the shard or link is gone."""
        shard = self._shards.of(number)
        if shard is None:
            return None
        if not link_of(number):
            return shard.holder, shard.scope
        holder = None if shard.links is None else shard.links.holder(link_of(number))
        return None if holder is None else (holder, "")

    def require(self, number: int, columns: Sequence[int], rows: RowIndices) -> None:
        """Raises Freed if `number` does not own all of these cells, Corrupt if the shard has no such column or row."""
        shard = self._shards.find(shard_of(number))
        self.check(shard, columns, rows)
        owned = link_of(number) == 0 if shard.links is None else shard.links.have(link_of(number), columns, rows)
        if not owned:
            raise self._shards.freeings.error(number)

    def check(self, shard: Shard, columns: Sequence[int], rows: RowIndices) -> None:
        """Raises Freed if a cell of this part was freed, Corrupt if the shard has no such column or row."""
        if any(not 0 <= column < shard.columns for column in columns) or rows.stop > shard.rows:
            raise Corrupt(
                f"shard {shard.number} has {shard.columns} columns of {shard.rows} rows, and the request names others",
                shard=shard.number,
            )
        if shard.live is not None and not all(shard.live.all(column, rows) for column in columns):
            raise self._shards.freeings.error(shard.number)

    def retain(self, wanted: Sequence[tuple[int, Selected]], *, holder: str) -> list[int]:
        """Create a link to these cells of each shard, all or none. The cells then stay until they are freed under the
        link too. Returns the numbers of the links.

        Raises Freed if no owner has a cell any more, Corrupt if a shard has no such column or row, LimitExceeded if the
        owner records take too much memory.
        """
        cost = 0
        for number, selected in wanted:
            shard = self._shards.find(shard_of(number))
            for columns, rows in selected:
                self.check(shard, columns, rows)
            links = shard.links or self._links(shard)
            cost += links.cost(selected) + (0 if shard.links is not None else links.nbytes)
            if self.nbytes + cost > _LINKS:
                what = "bytes that say who owns what several do"
                asked = self.nbytes + cost
                raise LimitExceeded(
                    f"{asked} {what}: put rows anew, or free some", what=what, asked=asked, limit=_LINKS
                )
        made = []
        try:
            for number, selected in wanted:
                made.append(self.retain_as(number, selected, holder=holder))
        except LimitExceeded:
            self._free(made)
            raise
        return made

    def retain_as(self, number: int, selected: Selected, *, holder: str, link: int | None = None) -> int:
        """Create a link to cells of one shard, unchecked. `link`: its number where the shard was put; None: a new one.
        Returns the number of the link. Raises Freed, or LimitExceeded if no link numbers are left."""
        shard = self._shards.find(shard_of(number))
        if shard.links is None:
            shard.links = self._links(shard)
            self.nbytes += shard.links.nbytes
        before = shard.links.nbytes
        made = linked(shard.number, shard.links.retain(selected, holder, link))
        self.nbytes += shard.links.nbytes - before
        self.retained(made, selected)
        return made

    def selected(self, number: int) -> Selected:
        """The cells of a link; none if the link is gone. Raises Freed if the shard is gone."""
        links = self._shards.find(shard_of(number)).links
        return [] if links is None else links.selected(link_of(number))

    def relink(self, number: int) -> None:
        """Restore, after a restart, a link to all cells of a shard. Raises Freed if the shard is gone."""
        shard = self._shards.find(shard_of(number))
        everything = [(range(shard.columns), RowIndices.range(0, shard.rows))]
        self.retain_as(shard.number, everything, holder=shard.holder, link=link_of(number))

    def release(self, shard: Shard, number: int, selected: Selected | None) -> list[tuple[int, RowIndices]]:
        """Free these cells (None: all) of one owner of a shard with several. Returns those left without an owner."""
        assert shard.links is not None
        before = shard.links.nbytes
        died = shard.links.free(link_of(number), selected)
        self.nbytes += shard.links.nbytes - before
        if len(shard.links) == 1 and shard.links.holder(0) is not None:
            self.forget(shard)
            shard.next_link, shard.links = shard.links.next_link, None
        return died

    def forget(self, shard: Shard) -> None:
        """Forget the owners of a shard that is removed."""
        if shard.links is not None:
            self.nbytes -= shard.links.nbytes

    def _links(self, shard: Shard) -> Links:
        return Links(shard.columns, shard.rows, shard.live, shard.holder, shard.next_link)
