"""The calls broadcast, scatter, gather and get: each names the ranks that have rows and the ranks that receive them.

Ranks agree on that (`agreement`) before any bytes are sent (`exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from dataplane.batch import locations, tensors
from dataplane.batch.batch import Batch, Column, taken
from dataplane.batch.concat import concat
from dataplane.batch.field import Field
from dataplane.batch.layout import Index
from dataplane.batch.ref import BatchRef, ShardKey
from dataplane.clock import Deadline
from dataplane.collective.agreement import Agreed, AgreedTransfers, Decide, Statement, agree, confirm
from dataplane.collective.exchange import Chain, move
from dataplane.collective.link import RankLink, described, link_of
from dataplane.collective.packing import PackedBatch, fields, pack
from dataplane.device.memory import device_of
from dataplane.errors import Misuse


class RowReader(Protocol):
    """The source of a rank's rows: a `dataplane.Plane`."""

    @property
    def address(self) -> str:
        """The address of the node."""

    def get(self, ref: BatchRef, *, timeout: float) -> Batch:
        """The rows of the reference."""


def broadcast(ref: BatchRef | None, group: Any, plane: RowReader, device: Any, deadline: Deadline) -> Batch:
    """See `collective.broadcast`."""

    def decide(heard: Sequence[Statement]) -> AgreedTransfers:
        source = _source(heard, "a reference")
        near = [rank for rank in range(len(heard)) if heard[rank].host == heard[source].host]
        far = sorted(set(range(len(heard))) - set(near), key=lambda rank: (heard[rank].host, rank))
        return AgreedTransfers([[source, *(rank for rank in near if rank != source), *far]])

    with _calling(group, deadline) as link:
        own, batches = _exchanged(link, "broadcast", plane, None if ref is None else [ref], decide, device)
        return _placed(own[0] if own else batches[0], device)


def scatter(refs: Sequence[BatchRef] | None, group: Any, plane: RowReader, device: Any, deadline: Deadline) -> Batch:
    """See `collective.scatter`."""

    def decide(heard: Sequence[Statement]) -> AgreedTransfers:
        source = _source(heard, "a list of references")
        given = len(heard[source].refs or [])
        if given != len(heard):
            raise Misuse(f"rank {source} scatters {given} references over {len(heard)} ranks: it takes one a rank")
        return AgreedTransfers([[source, rank] for rank in range(len(heard)) if rank != source])

    with _calling(group, deadline) as link:
        own, batches = _exchanged(link, "scatter", plane, refs, decide, device, stays=link.rank)
        return _placed(own[link.rank] if own else batches[0], device)


def gather(
    ref: BatchRef, group: Any, plane: RowReader, dst: Any, device: Any, deadline: Deadline
) -> list[Batch] | None:
    """See `collective.gather`."""

    def decide(heard: Sequence[Statement]) -> AgreedTransfers:
        if isinstance(dst, bool) or not isinstance(dst, int) or not 0 <= dst < len(heard):
            raise Misuse(f"dst is a rank of a group of {len(heard)}, not {dst!r}")
        return AgreedTransfers([[rank, dst] for rank in range(len(heard)) if rank != dst])

    with _calling(group, deadline) as link:
        stays = 0 if link.rank == dst else None
        (own,), batches = _exchanged(link, f"gather to rank {dst!r}", plane, [ref], decide, device, stays=stays)
        if link.rank != dst:
            return None
        return [_placed(batch, device) for batch in (*batches[:dst], own, *batches[dst:])]


def get(ref: BatchRef, group: Any, plane: RowReader, device: Any, deadline: Deadline) -> Batch:
    """See `collective.get`."""
    with _calling(group, deadline) as link:
        asked = agree(link, Statement("get", _host(plane), [ref.encode()]), _readers)
        sent = {tuple(chain): other for chain, other in zip(asked.chains, asked.refs, strict=True)}
        led = [chain for chain in asked.chains if chain[0] == link.rank]
        reads = [BatchRef.decode(sent[tuple(chain)]) if sent[tuple(chain)] else ref for chain in led]
        stays = 0 if led and led[0] == [link.rank] else None
        own, batches = _exchanged(
            link, "get", plane, reads, lambda _: AgreedTransfers(asked.chains), device, stays=stays
        )
        return _placed(own[0] if own else batches[0], device)


def _readers(heard: Sequence[Statement]) -> AgreedTransfers:
    """Among the ranks of a host that want the same rows, all or some, the first reads them, and sends the others
    theirs."""
    chains: list[list[int]] = []
    refs: list[bytes] = []
    for host in dict.fromkeys(said.host for said in heard):
        alike: dict[bytes, list[int]] = {}
        for rank, said in enumerate(heard):
            if said.host == host:
                alike.setdefault(b"".join(said.refs or ()), []).append(rank)
        asked = list(alike)
        groups = overlapping([BatchRef.decode(each) for each in asked]) if len(asked) > 1 else [[0]]
        for first, *others in groups:
            reader = alike[asked[first]][0]
            chains += alike[asked[first]], *([reader, *alike[asked[other]]] for other in others)
            refs += b"", *(asked[other] for other in others)
    return AgreedTransfers(chains, refs)


@contextmanager
def _calling(group: Any, deadline: Deadline) -> Iterator[RankLink]:
    """The connected link of the group, for one call. An error within it ends the link, unless all ranks know of it."""
    link = link_of(group)
    link.begin(deadline)
    unknown: BaseException | None = None
    try:
        link.connect()
        yield link
        confirm(link)
    except Agreed as agreed:
        raise agreed.error from None
    except BaseException as error:
        unknown = error
        raise
    finally:
        link.end(unknown)
        del unknown  # its frames hold this one


def _exchanged(
    link: RankLink,
    call: str,
    plane: RowReader,
    refs: Sequence[BatchRef] | None,
    decide: Decide,
    device: Any,
    *,
    stays: int | None = None,
) -> tuple[list[Batch], list[Batch]]:
    """Read this rank's references, and send the batch of each to other ranks, except that of the reference at position
    `stays`. Returns the batches read, and the batches received, in the order of `AgreedTransfers.chains`. A rank that
    cannot read reports that to the others."""
    named = None if refs is None else [b""] * len(refs)
    own: list[Batch] = []
    packs: list[PackedBatch] = []
    try:
        found = None if device is None else device_of(device)
        own = read_once(lambda ref: plane.get(ref, timeout=link.remaining_s), refs or ())
        for batch in own if found is not None else ():
            _require_dtypes(batch.schema.items())
        packs += [pack(batch) for number, batch in enumerate(own) if number != stays and link.size > 1]
    except Exception as error:  # raised on all ranks: on this one as it is
        agree(link, Statement(call, _host(plane), named, error=described(error, link.rank)), decide, error)
        raise
    devices = link.devices(found)
    headers = [packed.header for packed in packs]
    answer = agree(link, Statement(call, _host(plane), named, headers, devices is not None), decide)
    left, mine = iter(packs), []
    for number, chain in enumerate(answer.chains):
        if link.rank in chain and len(chain) > 1:
            packed = next(left) if chain[0] == link.rank else None
            through = devices if answer.devices else None
            mine.append(Chain(number, chain, link.rank, packed, answer.headers[number], found, through))
    for coming in mine if found is not None else ():
        _require_dtypes(fields(coming.header))
    move(link, mine)
    return own, [chain.batch() for chain in mine if chain.before is not None]


def _require_dtypes(columns: Iterable[tuple[str, Field]]) -> None:
    """Raises SchemaMismatch if these become tensors of a dtype that this rank's torch lacks."""
    for name, field in columns:
        if field.kind in ("dense", "ragged"):
            tensors.require(name, field.dtype)


def _placed(batch: Batch, device: Any) -> Batch:
    return batch if device is None else batch.to(device)


def _source(heard: Sequence[Statement], what: str) -> int:
    """The one rank with references. Raises Misuse unless it is exactly one."""
    sources = [rank for rank, said in enumerate(heard) if said.refs is not None]
    if len(sources) != 1:
        raise Misuse(f"one rank of the group gives {what}, and all others None; here {sources or 'none'} gave one")
    return sources[0]


def _host(plane: RowReader) -> str:
    """Equal for planes of the same node. If two nodes had the same value, the ranks of one would read for the
    other's."""
    return f"{_boot()} {plane.address}"


@lru_cache(maxsize=1)
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


# References to partly the same stored rows: groups of them, and reads of each such row once for a whole group.


def overlapping(refs: Sequence[BatchRef]) -> list[list[int]]:
    """The references by position, grouped: two with a common stored row of a column are in one group, transitively.
    Groups and their members are in the given order."""
    leaders = list(range(len(refs)))  # of each, one of its group; a group's first is its own

    def leader(number: int) -> int:
        while leaders[number] != number:
            number = leaders[number]
        return number

    for rows in _meant(refs).values():
        owners = np.full(max(int(chosen.max()) for _, chosen in rows) + 1, -1, np.int64)
        for number, chosen in rows:
            for other in np.unique(owners[chosen]).tolist():
                if other >= 0:
                    first, second = sorted((leader(other), leader(number)))
                    leaders[second] = first
            owners[chosen] = number
    groups: dict[int, list[int]] = {}
    for number in range(len(refs)):
        groups.setdefault(leader(number), []).append(number)
    return list(groups.values())


def _meant(refs: Sequence[BatchRef]) -> dict[tuple[ShardKey, int], list[tuple[int, Index]]]:
    """For each stored column that several references use: the rows that each of them uses."""
    found: dict[tuple[ShardKey, int], list[tuple[int, Index]]] = {}
    for number, ref in enumerate(refs):
        for key, selected in locations.footprint(locations.unlinked(ref)).items():
            for ordinals, rows in selected:
                for ordinal in ordinals:
                    found.setdefault((key, ordinal), []).append((number, rows.array()))
    return {cell: rows for cell, rows in found.items() if len(rows) > 1}


def read_once(get: Callable[[BatchRef], Batch], refs: Sequence[BatchRef]) -> list[Batch]:
    """The rows of each reference. A column that several references have (with the same name and type) is read in one
    request, and a row that several references name is read once. Raises as `get`."""
    if len(refs) == 1:
        return [get(refs[0])]
    who: dict[tuple[str, Field], list[int]] = {}
    for number, ref in enumerate(refs):
        for name, field in ref.schema.items():
            who.setdefault((name, field), []).append(number)
    together: dict[tuple[int, ...], list[str]] = {}
    for (name, _), numbers in who.items():
        together.setdefault(tuple(numbers), []).append(name)
    columns: list[dict[str, Column]] = [{} for _ in refs]
    for who_asks, names in together.items():
        edges = [0, *accumulate(len(refs[number]) for number in who_asks)]
        for once, index in concat([refs[number].select(*names) for number in who_asks]).distinct():
            batch = get(once)
            for number, (start, stop) in zip(who_asks, pairwise(edges), strict=True):
                for name, column in batch.items():
                    columns[number][name] = _rows(column, start, stop, index)
    return [Batch({name: found[name] for name in ref.schema}) for ref, found in zip(refs, columns, strict=True)]


def _rows(column: Column, start: int, stop: int, index: Index | None) -> Column:
    """The rows at the positions `index[start:stop]`, or from `start`: as a run if they are consecutive."""
    if index is None or start == stop:
        return column[start:stop]
    chosen = index[start:stop]
    if (np.diff(chosen) == 1).all():
        return column[int(chosen[0]) : int(chosen[-1]) + 1]
    return taken(column, chosen)
