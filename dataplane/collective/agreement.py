"""The agreement of a call: each rank sends a statement to rank 0, and gets the one answer: the transfers, or the error.

Rank 0 receives all statements, decides, and sends the answers: two messages a rank. An error here is raised on all
ranks alike, and the link stays intact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from dataplane.collective.link import Described, RankLink
from dataplane.errors import DataplaneError, Misuse, ProtocolMismatch, describe, revive

T = TypeVar("T")


_LONGER_S = 0.25
"""The additional time, in seconds, that other ranks wait for rank 0, which can name the rank that it waited for in
vain."""


class Statement(msgspec.Struct, frozen=True, array_like=True):
    """The statement of one rank. `call`: the name of the call, the same on all ranks. `host`: the same for ranks
    that read from one node. `refs`: the encoded references that it names, if any. `headers`: one for each payload that
    it sends, in the order of `AgreedTransfers.chains`. `devices`: whether its device can send and receive tensors.
    `error`: why it cannot take part."""

    call: str
    host: str = ""
    refs: list[bytes] | None = None
    headers: list[bytes] = []
    devices: bool = False
    error: Described | None = None


class AgreedTransfers(msgspec.Struct, frozen=True, array_like=True):
    """The transfers. `chains`: for each payload the rank that has it, and then those that want it; `refs`: the
    content of a payload, if its rank has not stated it; `headers`: those of payloads that this rank receives;
    `devices`: whether large pieces go from device to device."""

    chains: list[list[int]] = []
    refs: list[bytes] = []
    headers: list[bytes] = []
    devices: bool = False
    error: Described | None = None


class Agreed(Exception):
    """All ranks of the call fail, and know it: `error` is the error that this one raises."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


Decide = Callable[[Sequence[Statement]], AgreedTransfers]


def agree(link: RankLink, said: Statement, decide: Decide, own: BaseException | None = None) -> AgreedTransfers:
    """The decision of rank 0. `decide` raises a DataplaneError if the statements do not fit together. `own`: the
    error that this rank stated. Raises Agreed on all ranks if a rank stated an error or `decide` raised one, and what
    `RankLink.wait` raises."""
    if link.rank:
        link.tell(0, msgspec.msgpack.encode(said, enc_hook=str))
        answer = _decoded(link.hear(0, _LONGER_S), AgreedTransfers)
    else:
        others = list(range(1, link.size))
        heard = [said, *(_decoded(text, Statement) for text in link.hear_all(others))]
        answer = _answer(heard, decide)
        headers = _headers(heard, answer.chains)
        for rank in others:
            link.tell(rank, msgspec.msgpack.encode(_to(rank, answer, headers), enc_hook=str))
        answer = _to(0, answer, headers)
    if answer.error is None:
        return answer
    link.flush()  # messages dropped before this would not arrive
    raise Agreed(own if own is not None and said.error == answer.error else revive(*answer.error))


def confirm(link: RankLink) -> None:
    """Return once all ranks have finished, and know it."""
    agree(link, Statement("the end of it"), lambda _: AgreedTransfers())
    link.flush()


def _answer(heard: Sequence[Statement], decide: Decide) -> AgreedTransfers:
    for said in heard:
        if said.error is not None:
            return AgreedTransfers(error=said.error)
    try:
        if len({said.call for said in heard}) > 1:
            asked = ", ".join(f"rank {rank}: {said.call}" for rank, said in enumerate(heard))
            raise Misuse(f"the ranks do not make the same call; {asked}"[:2000])
        return msgspec.structs.replace(decide(heard), devices=all(said.devices for said in heard))
    except DataplaneError as error:
        return AgreedTransfers(error=describe(error))


def _headers(heard: Sequence[Statement], chains: Sequence[Sequence[int]]) -> list[bytes]:
    """For each chain the header of its payload."""
    said = [iter(each.headers) for each in heard]
    return [next(said[source], b"") if others else b"" for source, *others in chains]


def _to(rank: int, answer: AgreedTransfers, headers: Sequence[bytes]) -> AgreedTransfers:
    """The answer for this rank."""
    own = [header if rank in chain[1:] else b"" for chain, header in zip(answer.chains, headers, strict=True)]
    return msgspec.structs.replace(answer, headers=own)


def _decoded(text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise ProtocolMismatch(f"a rank sent what is no {kind.__name__}: {error}") from None
