"""The four calls: who has what, who wants it, and what each rank is given in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

from dataplane.batch.batch import Batch
from dataplane.batch.concat import concat
from dataplane.batch.ref import BatchRef
from dataplane.clock import Deadline
from dataplane.collective.agreeing import Agreed, Said, agree, confirm
from dataplane.collective.link import Link, described, link_of
from dataplane.collective.moving import Chain, move
from dataplane.collective.packing import pack
from dataplane.device.naming import device_of
from dataplane.errors import Misuse


class Reader(Protocol):
    """Whence a rank reads: a `dataplane.Plane`."""

    @property
    def address(self) -> str:
        """Which node of this host it reads from."""

    def get(self, ref: BatchRef, *, timeout: float) -> Batch:
        """The rows that the reference means."""


def broadcast(ref: BatchRef | None, group: Any, plane: Reader, device: Any, deadline: Deadline) -> Batch:
    """See `collective.broadcast`."""

    def decide(heard: Sequence[Said]) -> list[list[int]]:
        source = _source(heard, "a reference")
        near = [rank for rank in range(len(heard)) if heard[rank].host == heard[source].host]
        far = sorted(set(range(len(heard))) - set(near), key=lambda rank: (heard[rank].host, rank))
        return [[source, *(rank for rank in near if rank != source), *far]]

    with _calling(group, deadline) as link:
        own, chains = _read(link, "broadcast", plane, [] if ref is None else [ref], decide)
        batches = _moved(link, chains, lambda _: own[0], device)
        return _placed(own[0] if own else batches[0], device)


def scatter(refs: Sequence[BatchRef] | None, group: Any, plane: Reader, device: Any, deadline: Deadline) -> Batch:
    """See `collective.scatter`."""

    def decide(heard: Sequence[Said]) -> list[list[int]]:
        source = _source(heard, "a list of references")
        given = len(heard[source].refs or [])
        if given != len(heard):
            raise Misuse(f"rank {source} scatters {given} references over {len(heard)} ranks: it takes one a rank")
        return [[source, rank] for rank in range(len(heard)) if rank != source]

    with _calling(group, deadline) as link:
        own, chains = _read(link, "scatter", plane, refs, decide)
        batches = _moved(link, chains, lambda chain: own[chain[1]], device)
        return _placed(own[link.rank] if own else batches[0], device)


def gather(ref: BatchRef, group: Any, plane: Reader, dst: Any, device: Any, deadline: Deadline) -> list[Batch] | None:
    """See `collective.gather`."""

    def decide(heard: Sequence[Said]) -> list[list[int]]:
        if isinstance(dst, bool) or not isinstance(dst, int) or not 0 <= dst < len(heard):
            raise Misuse(f"dst is a rank of a group of {len(heard)}, not {dst!r}")
        return [[rank, dst] for rank in range(len(heard)) if rank != dst]

    with _calling(group, deadline) as link:
        (own,), chains = _read(link, f"gather to rank {dst!r}", plane, [ref], decide)
        batches = _moved(link, chains, lambda _: own, device if link.rank == dst else None)
        if link.rank != dst:
            return None
        return [_placed(batch, device) for batch in (*batches[:dst], own, *batches[dst:])]


def get(ref: BatchRef, group: Any, plane: Reader, device: Any, deadline: Deadline) -> Batch:
    """See `collective.get`."""

    def decide(heard: Sequence[Said]) -> list[list[int]]:
        alike: dict[tuple[str, bytes], list[int]] = {}
        for rank, said in enumerate(heard):
            alike.setdefault((said.host, b"".join(said.refs or ())), []).append(rank)
        return list(alike.values())

    with _calling(group, deadline) as link:
        chains = agree(link, Said("get", _host(plane), [ref.encode()]), decide)
        (mine,) = (chain for chain in chains if link.rank in chain)
        reads = [ref] if mine[0] == link.rank else []
        own, _ = _read(link, "get", plane, reads, lambda _: [])
        batches = _moved(link, chains, lambda _: own[0], device)
        return _placed(own[0] if own else batches[0], device)


@contextmanager
def _calling(group: Any, deadline: Deadline) -> Iterator[Link]:
    """The link of the group, connected, for one call. What is raised within it ends the link, unless all ranks know."""
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


def _read(
    link: Link,
    call: str,
    plane: Reader,
    refs: Sequence[BatchRef] | None,
    decide: Callable[[Sequence[Said]], list[list[int]]],
) -> tuple[list[Batch], list[list[int]]]:
    """This rank's references, read, and what all ranks then agree on. One that can not read tells the others."""
    named = None if not refs else [b""] * len(refs)
    batches: list[Batch] = []
    try:
        batches = _batches(plane, refs or (), link)
    except Exception as error:  # raised on all ranks: on this one as it is
        agree(link, Said(call, _host(plane), named, described(error, link.rank)), decide, error)
    return batches, agree(link, Said(call, _host(plane), named), decide)


def _batches(plane: Reader, refs: Sequence[BatchRef], link: Link) -> list[Batch]:
    """The rows of each reference: by one read where they have the same columns, since a read is a message or more."""
    if len(refs) < 2 or any(list(ref.schema.items()) != list(refs[0].schema.items()) for ref in refs):
        return [plane.get(ref, timeout=link.remaining_s) for ref in refs]
    whole = plane.get(concat(refs), timeout=link.remaining_s)
    edges = [0, *accumulate(map(len, refs))]
    return [Batch({name: column[a:b] for name, column in whole.items()}) for a, b in pairwise(edges)]


def _moved(link: Link, chains: list[list[int]], source: Callable[[list[int]], Batch], device: Any) -> list[Batch]:
    """What this rank receives, in the order of chains. `source`: the batch of a chain that begins here."""
    found = None if device is None else device_of(device)
    mine = []
    for number, chain in enumerate(chains):
        if link.rank in chain and len(chain) > 1:
            packed = pack(source(chain)) if chain[0] == link.rank else None
            mine.append(Chain(number, chain, link.rank, packed, found))
    move(link, mine)
    return [chain.batch() for chain in mine if chain.before is not None]


def _placed(batch: Batch, device: Any) -> Batch:
    return batch if device is None else batch.to(device)


def _source(heard: Sequence[Said], what: str) -> int:
    """The one rank that has references. Raises Misuse where it is not one."""
    sources = [rank for rank, said in enumerate(heard) if said.refs is not None]
    if len(sources) != 1:
        raise Misuse(f"one rank of the group gives {what}, and all others None; here {sources or 'none'} gave one")
    return sources[0]


def _host(plane: Reader) -> str:
    """Alike for planes of the same node. Where two nodes are taken for one, the ranks of one read for the other's."""
    return f"{_boot()} {plane.address}"


@lru_cache(maxsize=1)
def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
