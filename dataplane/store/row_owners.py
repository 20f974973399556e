"""The owners of the rows of a store's shards: the clients that put them, and those that retained some.

Most shards have one owner and no `links`; the first retain of a shard makes them (`store.links`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dataplane.batch.rows import Rows
from dataplane.batch.shard_ids import link_of, linked, shard_of
from dataplane.errors import Corrupt, LimitExceeded
from dataplane.store.freeings import Freeings
from dataplane.store.links import Links, Selected
from dataplane.store.shard import Shard

_LINKS = 64 << 20  # bytes that the owners of shards with several may take


class RowOwners:
    """The owners of the rows of one store's shards."""

    def __init__(
        self,
        shards: dict[int, Shard],
        find: Callable[[int], Shard],
        free: Callable[[Iterable[int]], None],
        freeings: Freeings,
    ) -> None:
        """`shards`: all of the store; `find` raises as `Store.pin`; `free`: as `Store.free`."""
        self._shards = shards
        self._find = find
        self._free = free
        self._freeings = freeings
        self.nbytes = 0
        """The bytes that the owners of shards with several take, about."""
        self.retained: Callable[[int, Selected], None] = lambda number, selected: None
        """Called with a new link and the rows of columns that it is to."""

    def has_several(self, number: int) -> bool:
        """Whether the shard exists and has several owners."""
        shard = self._shards.get(number)
        return shard is not None and shard.links is not None

    def require(self, number: int, columns: Sequence[int], rows: Rows) -> None:
        """Raises Freed, Corrupt if this part of a shard, or of a link's cells, does not exist."""
        shard = self._find(shard_of(number))
        self._check(shard, columns, rows)
        owned = link_of(number) == 0 if shard.links is None else shard.links.have(link_of(number), columns, rows)
        if not owned:
            raise self._freeings.error(number)

    def check(self, number: int, columns: Sequence[int], rows: Rows) -> None:
        """Raises Freed, Corrupt if no owner has this part of a shard."""
        self._check(self._find(number), columns, rows)

    def _check(self, shard: Shard, columns: Sequence[int], rows: Rows) -> None:
        """Raises Freed, Corrupt if no owner has this part of the shard."""
        if any(not 0 <= column < shard.columns for column in columns) or rows.stop > shard.rows:
            raise Corrupt(
                f"shard {shard.number} has {shard.columns} columns of {shard.rows} rows, not what is meant",
                shard=shard.number,
            )
        if shard.live is not None and not all(shard.live.all(column, rows) for column in columns):
            raise self._freeings.error(shard.number)

    def retain(self, wanted: Sequence[tuple[int, Selected]], *, holder: str) -> list[int]:
        """Create a link to these cells of each shard, which then stay until they are freed under the link too. Returns
        the numbers of the links, all or none.

        For a shard with several owners it suffices that one has the cells. Raises Freed or Corrupt as `require`,
        LimitExceeded if the owners take too much memory.
        """
        cost = 0
        for number, selected in wanted:
            shard = self._find(shard_of(number))
            for columns, rows in selected:
                self._check(shard, columns, rows)
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
        """As `retain`, for all existing cells of one shard; `link`: its number where the shard was put."""
        shard = self._find(shard_of(number))
        if shard.links is None:
            shard.links = self._links(shard)
            self.nbytes += shard.links.nbytes
        before = shard.links.nbytes
        made = linked(shard.number, shard.links.retain(selected, holder, link))
        self.nbytes += shard.links.nbytes - before
        self.retained(made, selected)
        return made

    def relink(self, number: int) -> None:
        """Restore a link that a shard had in an earlier life, to all of it. Raises Freed, Corrupt."""
        shard = self._find(shard_of(number))
        everything = [(range(shard.columns), Rows.range(0, shard.rows))]
        self.retain_as(shard.number, everything, holder=shard.holder, link=link_of(number))

    def release(self, shard: Shard, number: int, selected: Selected | None) -> list[tuple[int, Rows]]:
        """One owner of a shard with several frees cells, or all. Returns the cells that have no owner any more."""
        assert shard.links is not None
        before = shard.links.nbytes
        died = shard.links.free(link_of(number), selected)
        self.nbytes += shard.links.nbytes - before
        return died

    def forget(self, shard: Shard) -> None:
        """The shard is removed."""
        if shard.links is not None:
            self.nbytes -= shard.links.nbytes

    def _links(self, shard: Shard) -> Links:
        return Links(shard.columns, shard.rows, shard.live, shard.holder)
