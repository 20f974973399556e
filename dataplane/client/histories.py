"""A client's interface to a history: the responses to each prompt in earlier epochs, for drafts and predicted lengths.

A history is stored in a table (`client.tables`) with a row for each prompt and `keep * samples` columns, the places of
responses. A response's metadata is a tag with the name of its place, so lengths are known without reading tokens.
Tokens stay where they were written, or are recorded by reference. A drafter reads tokens in place, and fetches them
once for each host.

Invariants: a failed call frees the rows that it has stored. A prompt has at most `keep * samples` responses, of its
newest `keep` epochs. Responses of the oldest epoch are removed first, and within an epoch those with the lowest reward.
If two processes record the same prompt at once, they may use the same place. The later response then replaces the
other. If responses are removed while a drafter is made, or their host is lost, the drafter has fewer.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dataplane.batch.ref import BatchRef
from dataplane.client import arguments
from dataplane.client.background import Background
from dataplane.client.tables import TIMEOUT_S, AsyncTable
from dataplane.errors import (
    Closed,
    DataplaneError,
    Freed,
    LeaseExpired,
    Lost,
    Misuse,
    NotReady,
    OutcomeUnknown,
    PeerUnavailable,
    Retryable,
)
from dataplane.history.drafter import LONGEST, Drafter, Learnt, Response
from dataplane.history.lengths import Lengths, Past, predict
from dataplane.history.matching import Tokens, order, tokens_of
from dataplane.history.scheduling import Schedule, plan

if TYPE_CHECKING:
    from dataplane.client.delivery import Delivery
    from dataplane.client.plane import AsyncPlane
    from dataplane.client.streams import AsyncStream

KEEP, SAMPLES = 4, 8
MAX_BYTES = 1 << 30
"""The default capacity of a history."""

_SPARED = 0.9  # when `max_bytes` is exceeded, responses are removed down to this share of it
_LOOKED = 4096  # prompts that are looked at together when responses are removed
_ORDERS_BYTES = 64 << 20  # the most bytes of suffix orders that a process caches
_TRIES = 3
_ROWS = 256
_WAIT_S = 0.5  # seconds of waiting for rows between two checks whether to end


class StoredResponse(NamedTuple):
    """The metadata of a response. `place`: its column. `mark`: higher for later responses."""

    place: str
    epoch: int
    length: int
    reward: float | None
    mark: int


@dataclass(frozen=True, slots=True)
class NewResponses:
    """Responses to be recorded: a key, tokens, an epoch and a reward each. `ref`: the tokens if they are stored
    already, in a column `tokens`; the history owns the reference."""

    keys: list[str]
    tokens: list[npt.NDArray[Any]]
    ref: BatchRef | None
    epochs: list[int]
    rewards: list[float | None]

    def columns(self, rows: list[int], place: str) -> Any:
        """The tokens of these rows as the column `place`, for a table."""
        if self.ref is not None:
            return self.ref[np.array(rows)].rename({"tokens": place})
        return {place: [self.tokens[row] for row in rows]}


@dataclass(frozen=True, slots=True)
class Following:
    """The task and the columns by which a history records a stream. See `AsyncHistory.follow`."""

    history: AsyncHistory
    task: str
    tokens: str
    key: str | None
    reward: str | None

    @property
    def columns(self) -> list[str]:
        """The columns that a row must have."""
        return [name for name in (self.tokens, self.key, self.reward) if name is not None]


class AsyncHistory:
    """The responses of earlier epochs, by prompt. Made by `plane.history`; any number of processes may use it."""

    def __init__(
        self, plane: AsyncPlane, table: AsyncTable, keep: int, samples: int, max_bytes: int | str, dtype: str
    ) -> None:
        self.name = table.name.partition("/")[2]
        self.keep, self.samples = arguments.positive("keep", keep), arguments.positive("samples", samples)
        if self.keep * self.samples > 512:
            raise Misuse(f"a prompt has at most 512 responses, not {keep} epochs of {samples}")
        self.max_bytes = arguments.capacity(max_bytes)
        if dtype not in ("int32", "int64"):
            raise Misuse(f"a history's tokens are int32 or int64, not {dtype!r}")
        self.dtype = np.dtype(dtype)
        self._plane, self._table = plane, table
        self._places = [f"r{place}" for place in range(self.keep * self.samples)]
        self._learnt = Learnt()
        self._orders: OrderedDict[int, Tokens] = OrderedDict()
        self._ordered_bytes = 0
        self._unchecked = 0

    def __repr__(self) -> str:
        return f"<history {self.name!r}>"

    # recording

    async def add(
        self, key: str, tokens: Any, *, epoch: int = 0, reward: float | None = None, timeout: float = TIMEOUT_S
    ) -> None:
        """Add a response to the prompt with this key. An empty response is ignored.

        tokens: the token ids, a flat sequence or a one-dimensional array. epoch: the epoch of training or the policy's
        version; higher is newer. reward: a number, or None. Drafts prefer responses with higher rewards. timeout:
        seconds to wait for room. Raises Misuse, SchemaMismatch, Backpressure, PeerUnavailable.
        """
        own, named = tokens_of(tokens, self.dtype), [_key(key)]
        epochs, rewards = [arguments.whole("epoch", epoch)], [_reward(reward)]
        if len(own):
            await self._record(NewResponses(named, [own], None, epochs, rewards), timeout)

    async def record(
        self,
        ref: BatchRef,
        *,
        key: str | Sequence[str] = "key",
        tokens: str = "response_ids",
        epoch: int | Sequence[int] = 0,
        reward: str | Sequence[float | None] | None = None,
        timeout: float = TIMEOUT_S,
    ) -> None:
        """Add the response of each row of a reference. Tokens in a ragged column with the history's dtype are added
        without a copy, and stay even if the rows are freed. Other tokens are copied to the history's dtype.

        key, reward: the name of the column, or a value for each row. tokens: the column of token ids. epoch: as for
        `add`, for all rows or for each. timeout: seconds to wait for memory. Raises as `add`, and Freed or OwnerDied if
        the rows cannot be read.
        """
        rows = len(ref)
        said = [name for name in (key, reward) if isinstance(name, str)]
        batch = await self._plane.get(ref.select(*dict.fromkeys([*said, tokens])), timeout=timeout)
        keys = batch[key].to_list() if isinstance(key, str) else arguments.listed("key", key)
        rewards = batch[reward].to_list() if isinstance(reward, str) else reward
        epochs = [epoch] * rows if isinstance(epoch, int | np.integer) else arguments.listed("epoch", epoch)
        known: list[float | None] = [_reward(each) for each in ([None] * rows if rewards is None else rewards)]
        if not len(keys) == len(epochs) == len(known) == rows:
            raise Misuse(f"{rows} rows have {len(keys)} keys, {len(epochs)} epochs and {len(known)} rewards")
        values = [tokens_of(each, self.dtype) for each in batch[tokens].numpy()]
        named, numbers = [_key(str(each)) for each in keys], [arguments.whole("epoch", int(each)) for each in epochs]
        own = None
        if repr(ref.schema[tokens]) == f"ragged {self.dtype} [*]":
            own = (await self._plane.retain(ref.select(tokens))).rename({tokens: "tokens"})
        await self._record(NewResponses(named, values, own, numbers, known), timeout)

    async def follow(
        self,
        stream: AsyncStream,
        *,
        task: str = "history",
        tokens: str = "response_ids",
        key: str | None = None,
        reward: str | None = None,
        rows: int = 256,
    ) -> int:
        """Record the rows of a stream as its task `task`, until it is closed and has no more. Returns the number of
        recorded rows. Raises as `record` and `stream.deliveries`.

        A row's policy version is its epoch. tokens, key, reward: the columns with the token ids, the prompt's key and
        the reward. A row is recorded once it has them. key=None: a row's group is the key, and rows without a group are
        ignored. rows: the most rows of one delivery.
        """
        how = self.following(task=task, tokens=tokens, key=key, reward=reward)
        count, inner = 0, getattr(stream, "_inner", stream)  # the asynchronous stream of a blocking one
        async for delivery in inner.deliveries(task, rows=rows, min_rows=1, columns=how.columns):
            async with delivery:
                count += await self.record_delivery(delivery, how)
        return count

    def following(
        self, *, task: str = "history", tokens: str = "response_ids", key: str | None = None, reward: str | None = None
    ) -> Following:
        """Return the argument `history` of `plane.stream` for other columns. Arguments as for `follow`."""
        return Following(self, task, tokens, key, reward)

    async def record_delivery(self, delivery: Delivery, how: Following) -> int:
        """Record the rows of a delivery; without `how.key`, only rows with a group. Returns the number of recorded
        rows. Does not settle the delivery. Raises as `record`."""
        ref, versions, key = delivery.ref, delivery.versions, how.key
        keys: str | list[str]
        if key is not None:
            keys = key
        else:
            rows = [row for row, group in enumerate(delivery.groups) if group is not None]
            if not rows:
                return 0
            ref, versions = ref[rows], [versions[row] for row in rows]
            keys = [str(delivery.groups[row]) for row in rows]
        await self.record(ref, key=keys, tokens=how.tokens, epoch=versions, reward=how.reward)
        return len(ref)

    def at(self, plane: AsyncPlane) -> AsyncHistory:
        """The same history, over another plane."""
        table = plane.table(self._table.name, durable=self._table._durable)
        return AsyncHistory(plane, table, self.keep, self.samples, self.max_bytes, self.dtype.name)

    async def _record(self, recorded: NewResponses, timeout: float) -> None:
        """Assign each response a place, and write it. The table becomes the owner of the rows of `ref`. Rows that are
        not written are freed."""
        left = np.ones(len(recorded.keys), bool)
        try:
            keys = list(dict.fromkeys(recorded.keys))
            numbers = await self._table.numbers(keys, create=True)
            seen = await self._table.look(numbers)
            held = {name: self._held(tags) for name, tags in zip(seen.keys, seen.tags, strict=True)}
            places: dict[str, list[int]] = {}
            tags = []
            arrived = (seen.changes & ((1 << 40) - 1)) << 22  # so that later responses sort last
            for row, name in enumerate(recorded.keys):
                mark = arrived | secrets.randbits(22)
                entry = (recorded.epochs[row], len(recorded.tokens[row]), recorded.rewards[row], mark)
                tags.append(list(entry))
                if entry[1]:
                    place = self._place(held[name])
                    held[name][place] = StoredResponse(place, *entry)
                    places.setdefault(place, []).append(row)
            for place, rows in places.items():
                for several in _each_once(rows, recorded.keys):
                    named, said = [recorded.keys[row] for row in several], [{place: tags[row]} for row in several]
                    await self._table.upsert(named, recorded.columns(several, place), tags=said, timeout=timeout)
                    left[several] = False
        finally:
            if recorded.ref is not None and left.any():
                with suppress(DataplaneError):
                    await self._plane.free(recorded.ref[np.flatnonzero(left)])
        await self._bound(sum(each.nbytes for each in recorded.tokens))

    def _held(self, tags: dict[str, Any]) -> dict[str, StoredResponse]:
        """The responses of a prompt by place."""
        found = {}
        for place in self._places:
            match tags.get(place):
                case [int(epoch), int(length), float() | int() | None as reward, int(mark)] if length > 0:
                    found[place] = StoredResponse(place, epoch, length, reward, mark)
        return found

    def _place(self, held: dict[str, StoredResponse]) -> str:
        """The place of a new response: a free one, else that of the response to be removed first."""
        if not held:
            return self._places[0]  # `_spare` finds prompts with responses by their first place
        free = [place for place in self._places if place not in held]
        if free:
            return free[secrets.randbelow(len(free))]
        return min(held.values(), key=_usefulness).place

    # the bound

    async def _bound(self, came: int) -> None:
        """Remove responses if the table has more than `max_bytes`. Checks after each 64th of it that was added here."""
        self._unchecked += came
        if self._unchecked * 64 < self.max_bytes:
            return
        self._unchecked = 0
        figures = (await self._plane.tables()).get(self._table.name)
        if figures is not None and figures["bytes"] > self.max_bytes:
            await self._spare(figures["bytes"] - int(self.max_bytes * _SPARED))

    async def _spare(self, over: int) -> None:
        """Remove responses of about `over` bytes, a proportional share from each run of `_LOOKED` prompts, in the order
        of `_usefulness`."""
        numbers = await self._table.ready([self._places[0]])
        total, left = len(numbers), over
        for start in range(0, total, _LOOKED):
            some = numbers[start : start + _LOOKED]
            with suppress(Misuse):  # the table was dropped
                seen = await self._table.look(some)
                share = -(-left * len(some) // (total - start))
                left -= await self._let_go(dict(zip(seen.keys, seen.tags, strict=True)), share)

    async def _let_go(self, prompts: dict[str, dict[str, Any]], share: int) -> int:
        """Remove responses of about `share` bytes. Returns the bytes. The rows of prompts stay, because others may add
        responses to them at the same time."""
        known = [(key, each) for key, tags in prompts.items() for each in self._held(tags).values()]
        known.sort(key=lambda one: _usefulness(one[1]))
        places: dict[str, list[str]] = {}
        gone = 0
        for key, each in known:
            if gone >= share:
                break
            gone += each.length * self.dtype.itemsize
            places.setdefault(each.place, []).append(key)
        nothing = np.empty(0, self.dtype)
        for place, keys in places.items():
            await self._table.upsert(keys, {place: [nothing] * len(keys)}, tags=[{place: None}] * len(keys))
        return gone

    # reading

    async def known(self, keys: Sequence[str]) -> list[list[StoredResponse]]:
        """Return for each of these prompts the metadata of its responses in its newest `keep` epochs, the oldest first.
        Reads no tokens."""
        named = [_key(key) for key in keys]
        seen = await self._table.look(list(dict.fromkeys(named)), missing_ok=True)
        found = dict(zip(seen.keys, seen.tags, strict=True))
        return [self._newest(found.get(key, {})) for key in named]

    def _newest(self, tags: dict[str, Any]) -> list[StoredResponse]:
        held = sorted(self._held(tags).values(), key=_usefulness)
        epochs = sorted({each.epoch for each in held})[-self.keep :]
        return [each for each in held if each.epoch in epochs]

    async def responses(self, key: str) -> list[Response]:
        """Return the responses to this prompt, the oldest epoch first. Tokens are int32, without a copy if that is the
        history's dtype. Responses that are lost or removed meanwhile are left out."""
        for _ in range(_TRIES):
            held = (await self.known([key]))[0]
            try:
                return await self._read(key, held)
            except (Freed, Misuse):  # replaced meanwhile: look again
                continue
            except (Lost, PeerUnavailable):  # the host of a response died or does not answer
                break
        found: list[Response] = []
        for each in (await self.known([key]))[0]:  # one at a time, because some are lost or are being replaced
            with suppress(Lost, PeerUnavailable, Misuse):
                found += await self._read(key, [each])
        return found

    async def _read(self, key: str, held: Sequence[StoredResponse]) -> list[Response]:
        if not held:
            return []
        batch = await self._plane.get(await self._table.read([key], [each.place for each in held]))
        return [self._response(each, batch[each.place].numpy()[0]) for each in held]

    def _response(self, held: StoredResponse, tokens: Any) -> Response:
        own = np.ascontiguousarray(tokens, np.int32)
        known = self._orders.pop(held.mark, None)
        if known is None or len(known) != len(own):
            known = order(own)
            self._ordered_bytes += known.nbytes
        self._orders[held.mark] = known
        while self._ordered_bytes > _ORDERS_BYTES and len(self._orders) > 1:
            self._ordered_bytes -= self._orders.popitem(last=False)[1].nbytes
        return Response(own, held.epoch, held.reward, known)

    async def drafter(self, key: str, *, max_tokens: int = LONGEST) -> Drafter:
        """Return a drafter, which proposes the next tokens of a new response to this prompt, from its first token on.
        Without earlier responses, it proposes none. max_tokens: the most tokens of one draft.

        Raises PeerUnavailable, and Misuse if the extension for drafts was not built.
        """
        return Drafter(await self.responses(key), max_tokens=max_tokens, learnt=self._learnt)

    # lengths

    async def lengths(self, keys: Sequence[str]) -> Lengths:
        """Predict the length in tokens of a response to each of these prompts, with its uncertainty. See
        `history.lengths`."""
        known = await self.known(keys)
        return predict([Past([(each.epoch, each.length) for each in held]) for held in known])

    async def schedule(
        self, keys: Sequence[str], workers: int, *, step: int = 0, samples: int = 1, slots: int | None = None
    ) -> Schedule:
        """Assign the responses to these prompts to workers, in an order, by predicted length. Arguments as for
        `history.scheduling.plan`."""
        return plan(await self.lengths(keys), workers, step=step, samples=samples, slots=slots)

    async def drop(self) -> None:
        """Remove all responses."""
        await self._table.drop()


def _usefulness(each: StoredResponse) -> tuple[int, float, int]:
    """The sort key by which responses are removed, the least first."""
    return each.epoch, -np.inf if each.reward is None else each.reward, each.mark


def _each_once(rows: Iterable[int], keys: Sequence[str]) -> Iterable[list[int]]:
    """The rows in runs in which no key is repeated."""
    run: dict[str, int] = {}
    for row in rows:
        if keys[row] in run:
            yield list(run.values())
            run = {}
        run[keys[row]] = row
    if run:
        yield list(run.values())


def _key(key: Any) -> str:
    return arguments.text("a prompt's key", key)


def _reward(reward: Any) -> float | None:
    if reward is None:
        return None
    try:
        found = float(reward)
    except (TypeError, ValueError):
        raise Misuse(f"a reward is a number, not {reward!r:.100}") from None
    return found if np.isfinite(found) else None


def followed(history: Any) -> Following | None:
    """Validate the `history` argument of `plane.stream`. Raises Misuse."""
    found = getattr(history, "_inner", history)
    if isinstance(found, AsyncHistory):
        found = found.following()
    if found is not None and not isinstance(found, Following):
        raise Misuse(f"history= is what plane.history(NAME) returned, or its .following(...), not {history!r:.100}")
    return found


def tasks(given: Sequence[str] | None, how: Following | None) -> Sequence[str] | None:
    """The given tasks of a stream, with the task of its history."""
    if how is None or given is None or isinstance(given, str) or how.task in given:
        return given
    return [*given, how.task]


class HistoryFollower(Background):
    """Records a stream's rows in a history once they have the recorded columns. It runs in a separate thread of the
    process that opened the stream (`plane.stream(history=...)`). `rows`: the number of recorded rows.

    Several processes that open the stream with a history share its rows. The work ends when the stream is closed and
    all of its rows are recorded, or when the plane is closed. The remaining rows then stay in the stream for the next
    process that opens it with a history.
    """

    def __init__(self, stream: AsyncStream, how: Following) -> None:
        super().__init__(stream._connection, f"history of {stream.name!r}")
        stream.settings.task(how.task)
        self._stream_name, self._how = stream.name, how
        self.rows = 0

    async def _run(self, plane: AsyncPlane, stop: asyncio.Event) -> None:
        how = self._how
        stream = await self._again(plane, stop, "open the stream", lambda: plane.stream(self._stream_name))
        history = how.history.at(plane)
        while not stop.is_set():
            try:
                delivery = await stream.consume(how.task, rows=_ROWS, columns=how.columns, timeout=_WAIT_S)
                with suppress(Lost, LeaseExpired):  # rows that are lost, or were leased to another consumer
                    async with delivery:
                        await self._record(history, delivery)
            except NotReady:
                continue
            except Closed:
                return
            except (Retryable, OutcomeUnknown) as error:
                await self._pause(plane, stop, "record rows", error)

    async def _record(self, history: AsyncHistory, delivery: Delivery) -> None:
        try:
            self.rows += await history.record_delivery(delivery, self._how)
        except (Retryable, OutcomeUnknown):
            with suppress(DataplaneError):
                await delivery.unseen()
            raise
