"""A client's interface to weights by version, published by one or several ranks and mapped by all processes of a host.

Weights are stored in two tables (`client.tables`), which survive the death of a host. The table of chunks owns the
bytes. It has a row for each chunk, a row for each difference between versions of a chunk, and rows whose tags hold the
layout of a part's chunks (`weights.layout`). The register has a row for each rank's part of a version, whose tags
locate the chunks. A rank writes this row last, and a version is visible once the rows of all ranks exist. So a version
whose rank died is never visible.

Invariants: the bytes of a version never change. A process that has mapped a version keeps it, also when the version is
removed. A version is removed once `keep` newer ones are complete, together with the remains of older ones whose ranks
died. Bytes stay where they were published. Each host fetches each chunk once. Hosts fetch in different orders, so that
they read different chunks from the publisher, and the other chunks from each other.
"""

from __future__ import annotations

import copy
import secrets
import zlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dataplane.batch import locations
from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.client import arguments
from dataplane.client.column_assembly import PinnedShard
from dataplane.client.ownership import free
from dataplane.client.publishing import Older, Publication
from dataplane.client.tables import TIMEOUT_S, AsyncTable
from dataplane.client.weight_map import Place, ReadPlan, Tensors, planned, ranges_of
from dataplane.clock import Deadline
from dataplane.errors import Corrupt, Freed, Lost, Misuse, NotReady, OutcomeUnknown, PeerUnavailable, Retryable
from dataplane.weights.layout import COLUMN, PartLocation, PublishedPart, decode, placement
from dataplane.weights.slices import Selected
from dataplane.wire import shard_messages as sm

if TYPE_CHECKING:
    from dataplane.client.plane import AsyncPlane

KEEP = 2
"""The default number of versions that are kept."""

_NEWS = 64  # the number of columns that announce versions in turn, to wake watchers
_TAG = 48 << 10  # the most bytes of a part in the tags of one row
_TRIES = 8
_LOOK_S = 5.0  # seconds between reads of a waiter, because a publisher may die before it announces its version


class AsyncWeights:
    """The versions of one set of weights. Made by `plane.weights`; any number of processes may publish and read."""

    def __init__(self, plane: AsyncPlane, register: AsyncTable, chunks: AsyncTable, keep: int, replicas: int) -> None:
        self.name = register.name.partition("/")[2]
        self.keep = arguments.whole("keep", keep)
        if self.keep < 1:
            raise Misuse(f"at least one version is kept, not {keep}")
        self.replicas = arguments.replicas(replicas)
        self._connection, self._writer, self._getter = plane.connection, plane.writer, plane._getter
        self._members = plane.members
        self._register, self._chunks = register, chunks
        self._plans: list[tuple[Any, ReadPlan]] = []  # recent requests with their plans, the latest first

    def __repr__(self) -> str:
        return f"<weights {self.name!r}>"

    # publishing

    async def publish(
        self, version: int, tensors: Any, *, rank: int = 0, ranks: int = 1, timeout: float = TIMEOUT_S
    ) -> None:
        """Publish a version, or one rank's part of it. Readers see the version once all `ranks` have published. The
        tensors may be changed when the call returns.

        version: an integer higher than the newest complete version.
        tensors: a mapping of names to tensors, or an iterable (also an asynchronous one) of (name, tensor). A tensor is
            a `torch.Tensor` of any device, strides and dtype except sparse and quantized ones, an array, a `DTensor`,
            of which each rank publishes its local shard, or a `dataplane.weights.Slice`. Tensors that share memory are
            stored once. Of an iterable, about 256 MiB are in memory at a time.
        rank, ranks: the number of this publisher, from 0 on, and the number of publishers. A rank whose tensors are all
            empty, or all published by other ranks, publishes an empty part.
        timeout: seconds to wait for room.

        Raises Misuse (no tensor, a repeated name, a version that is not new), SchemaMismatch (a value that is no
        tensor), Backpressure, LimitExceeded, PeerUnavailable; OutcomeUnknown: publish again. If that raises Misuse
        because the version is complete, it was published. A publication that failed otherwise or was cancelled is
        invisible. Its data is removed at once, or with the next complete version.
        """
        number, mine = arguments.whole("a version", version), arguments.whole("a rank", rank)
        if not 0 <= mine < arguments.whole("ranks", ranks):
            raise Misuse(f"rank is 0 to ranks - 1: not {rank} of {ranks}")
        deadline, mark = Deadline.after(arguments.seconds(timeout)), secrets.token_hex(8)
        seen = await self._seen()
        newest = max(seen.complete, default=None)
        if newest is not None and number <= newest:
            known = f"version {number} of {self!r} is not newer than {newest}, which is complete"
            raise Misuse(f"{known}: publish a higher one, or call drop() first")
        older = None if newest is None else await self._older(seen, newest, mine, ranks, deadline)
        async with Publication(self._connection, self._writer, deadline, older) as publication:
            chunks, entries, bases = await publication.write(tensors)
            part = PublishedPart(number, mine, ranks, chunks, entries, bases)
            if self.replicas > 1 and publication.refs:
                await self._writer.replicate(concat(publication.refs), self.replicas, deadline.remaining_s)
            keys = [_key("c", number, mine, mark, at) for at in range(len(chunks))]
            keys += [_key("d", number, mine, mark, at) for at in publication.deltas]
            await publication.give(self._chunks, keys)
            placed = publication.placement(part.layout)
        encoded = zlib.compress(part.encode(), 1)
        pages = [encoded[start : start + _TAG] for start in range(0, len(encoded), _TAG)]
        keys = [_key("q", number, mine, mark, page) for page in range(len(pages))]
        await self._chunks.upsert(keys, tags=[{"part": page} for page in pages])
        said = {} if len(placed) > _TAG else {PLACED: placed}
        own = _key("p", number, mine, mark, f"{ranks}/{len(pages)}")
        await self._register.upsert([own], tags=[said])
        with suppress(Retryable, OutcomeUnknown):  # the version is published: waiting readers will see it without this
            seen = await self._seen()
            late = mark not in seen.marks(number) and number in seen.complete
            if seen.last.get(number) == own:  # only the last rank announces the version
                await self._announce(seen.news)
            if seen.last.get(number) == own or late or seen.replaced:
                await self._tidy(seen)
            if late:
                by = "by another publication, or by an earlier attempt of this one"
                raise Misuse(f"version {number} of {self!r} was completed meanwhile {by}: publish a higher one")

    async def _older(
        self, seen: KnownVersions, version: int, rank: int, ranks: int, deadline: Deadline
    ) -> Older | None:
        """The part of this rank of a complete version, pinned. None if the version has another number of ranks, if this
        host's node does not store the whole part, or if its memory cannot hold the part twice."""
        if len(seen.complete[version]) != ranks:
            return None
        with suppress(Lost, Misuse, _VersionGone, Retryable):
            part = (await self._parts(seen, version, [rank]))[rank]
            roomy = 2 * part.nbytes <= self._connection.welcome.capacity  # pinned while the new part is written
            if part.chunks and roomy:
                rows = await self._read([seen.key("c", version, rank, at) for at in range(len(part.chunks))], COLUMN)
                pieces = locations.pieces(locations.unlinked(rows), COLUMN)
                if all(piece.node == self._connection.welcome.node for piece in pieces):
                    held = await self._getter.hold(rows, deadline.remaining_s)
                    return Older(part, rows, [held[piece.node, piece.shard] for piece in pieces])
        return None

    async def _announce(self, last: int) -> None:
        """Wake the waiting readers. `last`: the number of the last announcement. If two ranks announce with the same
        number, the later one stays, and the other rank announces again."""
        mark = secrets.token_hex(8)
        while True:
            last += 1
            key, column = f"n/{last}", f"n{last % _NEWS}"
            await self._register.upsert([key], {column: [mark]}, tags=[{"mark": mark}])
            with suppress(Misuse):
                if (await self._register.look([key])).tags[0].get("mark") == mark:
                    return

    async def _tidy(self, seen: KnownVersions) -> None:
        """Remove all but the newest `keep` complete versions, the remains of older incomplete ones and of publications
        that were repeated or late, and old announcements. Of a version that is not complete, only parts that were
        replaced are removed: rows without one may be of a publication that has not ended."""
        kept = {version: seen.marks(version) for version in sorted(seen.complete)[-self.keep :]}
        newest = max(kept, default=None)

        def old(key: str) -> bool:
            kind, number, *more = key.split("/")
            if kind == "n":
                return int(number) <= seen.news - _NEWS // 2
            ended = newest is not None and int(number) <= newest
            return more[1] not in kept.get(int(number), ()) if ended else more[1] in seen.replaced

        if gone := [key for key in seen.keys if old(key)]:
            await self._register.clear(gone)
        keys = (await self._chunks.look(tags=False)).keys
        if gone := [key for key in keys if old(key)]:
            await self._clear(gone, [key for key in keys if not old(key)])

    async def _clear(self, gone: Sequence[str], left: Sequence[str]) -> None:
        """Remove rows of chunks, of which those of `left` stay. Shards are freed by the table at their nodes; if a node
        has died, their replicas are freed here."""
        unneeded: list[BatchRef] = []
        if self.replicas > 1:
            with suppress(_VersionGone):  # another publisher removes these rows
                there = {bytes.fromhex(node) for node in (await self._members()).get("members", ())}
                needed = {shard for row in await self._rows(left) for shard in locations.unlinked(row).shards()}
                for row in await self._rows(gone):
                    shards = locations.unlinked(row).shards()
                    if needed.isdisjoint(shards) and not any(node in there for node, _ in shards):
                        unneeded += row, locations.unlinked(row)
        await self._chunks.clear(list(gone))
        if unneeded:
            with suppress(OutcomeUnknown):  # a node is away, and frees them later
                await free(self._connection, concat(unneeded), "")

    async def _rows(self, keys: Sequence[str]) -> list[BatchRef]:
        """A reference for each of these rows that has bytes. Raises _VersionGone."""
        named = [key for key in keys if key[:1] in "cd"]
        return [*await self._read(named, COLUMN)] if named else []

    async def drop(self) -> None:
        """Remove all versions. A process that has mapped one keeps it."""
        await self._register.drop()
        if keys := (await self._chunks.look(tags=False)).keys:
            await self._clear(keys, [])
        await self._chunks.drop()

    # reading

    async def versions(self) -> list[int]:
        """The complete versions, the oldest first."""
        return sorted((await self._seen()).complete)

    async def get(
        self,
        version: int | str | None = None,
        *,
        names: Sequence[str] | None = None,
        slices: Mapping[str, Selected] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> Tensors:
        """Map the tensors of a version. Returns a mapping of names to tensors, with the attribute `version`. All
        processes of a host map the same bytes. Each host fetches only the wanted bytes, once.

        version: a number, ">= N" for the newest complete version if it is N or higher, or None for the newest.
        names: the names of the wanted tensors; all if None.
        slices: the wanted parts of tensors, by name: for each dimension a slice of step 1, (start, stop) or None. Other
            tensors are mapped whole.
        timeout: seconds to wait for the version, and for room.

        Later versions do not change the mapping. Its memory is released when the mapping and all of its tensors are
        garbage-collected. Raises NotReady (no such version in time), Freed (the version is not kept any more), Misuse
        (a tensor, or a part of one, was not published), OwnerDied, Backpressure, PeerUnavailable.
        """
        deadline = Deadline.after(arguments.seconds(timeout))
        exact, least = _wanted(version)
        for left in reversed(range(_TRIES)):
            found, seen = await self._wait(exact, least, deadline)
            try:
                return await self._open(found, seen, names, slices, deadline)
            except PeerUnavailable:  # a host may be busy; a retry need not fetch the same chunks again
                if not left or not deadline.remaining_s:
                    raise
            except (Freed, _VersionGone):  # the version was removed meanwhile
                continue
        raise Freed(f"versions of {self!r} go before they are read: keep more than {self.keep}")

    async def _open(
        self,
        version: int,
        seen: KnownVersions,
        names: Sequence[str] | None,
        slices: Mapping[str, Selected] | None,
        deadline: Deadline,
    ) -> Tensors:
        """Map the tensors of a complete version. Raises as `get`, and _VersionGone or Freed if the version was removed
        meanwhile."""
        placed = seen.placements(version) or []
        asked = [each.layout for each in placed], None if names is None else list(names), dict(slices or {})
        plan = next((plan for of, plan in self._plans if of == asked), None) if placed else None
        parts: dict[int, PublishedPart] = {}
        if plan is None:
            parts = await self._parts(seen, version, range(len(seen.complete[version])))
            plan = planned(version, list(parts.values()), names, slices)
            if placed and [part.layout for part in parts.values()] == asked[0]:
                self._plans = [(copy.deepcopy(asked), plan), *self._plans[: _PLANS - 1]]
            else:
                placed = []
        here = shards_here(placed, self._connection.welcome.node, plan.chunks) if placed else None
        if here is not None:
            with suppress(Lost):  # the chunks may be at another place: read the table
                held = await self._getter.hold_own(here, deadline.remaining_s) if here else []
                return Tensors(version, plan.wanted, dict(zip(plan.chunks, held, strict=True)))
        if not parts:
            parts = await self._parts(seen, version, range(len(seen.complete[version])))
        return Tensors(version, plan.wanted, await self._hold(version, seen, parts, plan, deadline))

    async def _hold(
        self, version: int, seen: KnownVersions, parts: Mapping[int, PublishedPart], plan: ReadPlan, deadline: Deadline
    ) -> Mapping[Place, PinnedShard]:
        """Read the locations of the wanted chunks from the table, and pin them. Raises as `_open`."""
        wanted = plan.chunks
        if not wanted:
            return {}
        ref = await self._read([seen.key("c", version, *place) for place in wanted], COLUMN)
        shards = [(piece.node, piece.shard) for piece in locations.pieces(locations.unlinked(ref), COLUMN)]
        own = self._connection.welcome.node
        asked: dict[ShardKey, tuple[bytes, list[sm.Step]]] = {}
        if any(node != own for node, _ in shards):
            far = [place for place, (node, _) in zip(wanted, shards, strict=True) if node != own]
            steps = await self._steps(parts, far, seen)
            for (place, pieces), shard in zip(wanted.items(), shards, strict=True):
                asked[shard] = ranges_of(parts[place[0]].chunks[place[1]], pieces), steps.get(place, [])
        held = await self._getter.hold(ref, deadline.remaining_s, asked)
        return {place: held[shard] for place, shard in zip(wanted, shards, strict=True)}

    async def _parts(self, seen: KnownVersions, version: int, ranks: Iterable[int]) -> dict[int, PublishedPart]:
        """Read the layouts of these ranks' parts of a complete version. Raises _VersionGone, Corrupt."""
        if version not in seen.complete:
            raise _VersionGone(f"version {version} has gone")
        pages = [(rank, page) for rank in ranks for page in range(seen.complete[version][rank].pages)]
        try:
            rows = await self._chunks.look([seen.key("q", version, *place) for place in pages])
        except Misuse:
            raise _VersionGone(f"version {version} has gone") from None
        encoded: dict[int, bytes] = {}
        for (rank, _), tags in zip(pages, rows.tags, strict=True):
            encoded[rank] = encoded.get(rank, b"") + bytes(tags["part"])
        try:
            return {rank: decode(zlib.decompress(each)) for rank, each in encoded.items()}
        except zlib.error as error:
            raise Corrupt(f"no part of a version of weights: {error}") from None

    async def _steps(
        self, parts: Mapping[int, PublishedPart], places: Sequence[Place], seen: KnownVersions
    ) -> dict[Place, list[sm.Step]]:
        """For each of these chunks, the differences by which older versions lead to it, the newest first, as far back
        as versions are kept."""
        steps: dict[Place, list[sm.Step]] = {}
        of = dict(parts)
        left = list(places)
        with suppress(Lost, _VersionGone):
            while left:
                left = [(rank, chunk) for rank, chunk in left if rank in of and chunk in of[rank].bases]
                keys = [seen.key("d", of[rank].version, rank, chunk) for rank, chunk in left]
                pieces = locations.pieces(locations.unlinked(await self._read(keys, COLUMN)), COLUMN) if keys else ()
                for place, piece in zip(left, pieces, strict=True):
                    base = of[place[0]].bases[place[1]]
                    steps.setdefault(place, []).append((base.node, base.shard, piece.node, piece.shard))
                older = {of[rank].bases[chunk].version for rank, chunk in left} & seen.complete.keys()
                ranks = {rank for rank, _ in left}
                of = await self._parts(seen, older.pop(), ranks) if len(older) == 1 else {}
        return steps

    async def _read(self, keys: Sequence[str], column: str) -> Any:
        try:
            return await self._chunks.read(list(keys), [column])
        except Misuse:
            raise _VersionGone("chunks of this version have gone") from None

    async def _wait(self, exact: int | None, least: int | None, deadline: Deadline) -> tuple[int, KnownVersions]:
        """Wait until the version `exact`, or one from `least` on, is complete. Returns its number, and the known
        versions. Raises Freed, NotReady."""
        while True:
            seen = await self._seen()
            newest = max(seen.complete, default=None)
            if exact is not None and exact in seen.complete:
                return exact, seen
            if exact is not None and newest is not None and newest > exact:
                raise Freed(f"version {exact} of {self!r} is not kept any more, or was never there: {newest} is newer")
            if exact is None and newest is not None and (least is None or newest >= least):
                return newest, seen
            if not deadline.remaining_s:
                wanted = exact if exact is not None else f">= {least}" if least is not None else "any"
                there = "none was published" if newest is None else f"{newest} is the newest"
                said = f"no version of {self!r} was there in time: {wanted} is wanted, {there}"
                raise NotReady(said, stream=self.name, waited_s=deadline.waited_s)
            await self._sleep(seen, deadline)

    async def _sleep(self, seen: KnownVersions, deadline: Deadline) -> None:
        """Wait until a version is announced after `seen` was read, at most `_LOOK_S`."""
        with suppress(NotReady):
            await self._register.ready([f"n{(seen.news + 1) % _NEWS}"], timeout=min(_LOOK_S, deadline.remaining_s))

    async def newer(self, than: int | None = None, *, timeout: float = TIMEOUT_S) -> int:
        """Wait until a complete version is newer than `than`; None: until there is any. Returns the newest version.
        timeout: seconds to wait. Raises NotReady at the deadline."""
        least = None if than is None else arguments.whole("a version", than) + 1
        return (await self._wait(None, least, Deadline.after(arguments.seconds(timeout))))[0]

    async def watch(self, after: int | None = None, *, timeout: float | None = None) -> AsyncIterator[int]:
        """Iterate over version numbers: the newest complete one, and each newer one as soon as it is complete. A caller
        that is slow gets only the newest of them.

        after: the version above which to begin; None: any.
        timeout: seconds to wait for each version; None: no limit. Raises NotReady at the deadline.
        """
        while True:
            try:
                after = await self.newer(after, timeout=TIMEOUT_S if timeout is None else timeout)
            except NotReady:
                if timeout is not None:
                    raise
            else:
                yield after

    async def _seen(self) -> KnownVersions:
        """Read the register."""
        rows = await self._register.look()
        return KnownVersions.of(rows.keys, rows.tags)


class _VersionGone(Exception):
    """A version was removed."""


def _key(kind: str, version: int, rank: int, mark: str, what: int | str) -> str:
    """The key of a row. `mark`: of the publication, so that another one of the same version has other rows."""
    return f"{kind}/{version}/{rank}/{mark}/{what}"


def _wanted(version: int | str | None) -> tuple[int | None, int | None]:
    """The requested version and its lower bound; one of them or both are None. Raises Misuse."""
    if version is None:
        return None, None
    if not isinstance(version, str):
        return arguments.whole("a version", version), None
    sign, _, number = version.partition("=")
    try:
        if sign.strip() == ">":
            return None, int(number)
    except ValueError:
        pass
    raise Misuse(f'a version is a whole number, ">= N", or None for the newest; not {version!r}')


PLACED = "placed"
"""The name of the tag with the locations of a part's chunks, in the part's row of the register."""

_PLANS = 4  # the most plans that are cached, each for other names or slices


class CompletePart(NamedTuple):
    """A rank's part of a complete version: the mark of its publication, the number of rows of its layout, and the
    location of its chunks, or None."""

    mark: str
    pages: int
    placed: Any


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """The rows of the register table of these weights. A mark is a random text that distinguishes publications of one
    part. `complete`: the parts of each complete version, by rank. `last`: the key of the part
    that completed it; later parts do not count. `replaced`: the marks of parts that the same rank published again
    before their version was complete. `news`: the number of the last announcement."""

    complete: dict[int, list[CompletePart]]
    last: dict[int, str]
    replaced: set[str]
    news: int
    keys: list[str]

    @staticmethod
    def of(keys: list[str], tags: Sequence[Mapping[str, Any]]) -> KnownVersions:
        """The content of the register with these rows, the oldest first."""
        parts: dict[tuple[int, int], dict[int, CompletePart]] = {}  # by version and its number of ranks
        complete: dict[int, list[CompletePart]] = {}
        last: dict[int, str] = {}
        replaced: set[str] = set()
        news = 0
        for key, said in zip(keys, tags, strict=True):
            kind, number, *more = key.split("/")
            if kind == "n":
                news = max(news, int(number))
            elif kind == "p":
                version, rank, mark, ranks, pages = int(number), int(more[0]), more[1], int(more[2]), int(more[3])
                each = parts.setdefault((version, ranks), {})
                if rank in each and version not in complete:
                    replaced.add(each[rank].mark)
                each[rank] = CompletePart(mark, pages, said.get(PLACED))
                if len(each) == ranks and version not in complete:
                    complete[version] = [part for _, part in sorted(each.items())]
                    last[version] = key
        return KnownVersions(complete, last, replaced, news, keys)

    def marks(self, version: int) -> set[str]:
        """The marks of the parts of a version; empty if it is not complete."""
        return {part.mark for part in self.complete.get(version, [])}

    def key(self, kind: str, version: int, rank: int, what: int) -> str:
        """The key of a row of a part of a complete version."""
        return _key(kind, version, rank, self.complete[version][rank].mark, what)

    def placements(self, version: int) -> list[PartLocation] | None:
        """The locations of all parts of a version, by rank; None if one is unknown."""
        found = [placement(part.placed) for part in self.complete.get(version, [])]
        told = [each for each in found if each is not None]
        return told if told and len(told) == len(found) else None


def shards_here(placed: Sequence[PartLocation], node: bytes, chunks: Iterable[Place]) -> list[int] | None:
    """The shards of these chunks if all of them are on this node, else None."""
    if any(each.node != node for each in placed):
        return None
    numbers = [each.numbers() for each in placed]
    wanted = list(chunks)
    if any(chunk >= len(numbers[rank]) for rank, chunk in wanted):
        return None
    return [numbers[rank][chunk] for rank, chunk in wanted]
