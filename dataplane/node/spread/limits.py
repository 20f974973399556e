"""The limits of streams over several hosts, which hold for each as a whole: kept by one node, the home of its name.

That node lets in who appends, and each part tells it what it holds, again after every change. What was let in counts
until it is given back; what it brought is told then, and counts until the parts in question have told of it.

What always holds: what all parts hold, and what was let in, never pass a limit, as long as the members are the same;
after one has come or gone, nobody is let in before every part knows and has told what it holds, and what it is about to
announce to new homes. What a node that kept the limits before has let in counts as what those hold whose clients bring
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from dataplane.clock import Deadline
from dataplane.errors import Backpressure, Closed, DataplaneError, PeerUnavailable
from dataplane.node.spread.wholes import Whole, Wholes
from dataplane.node.streams.asking import Asking
from dataplane.stream.admission import Admission, Entry, Held
from dataplane.wire import messages as m
from dataplane.wire import peer_messages as pm

_AGAIN_S = 0.5
_COUNTED_S = 2.0

Keeper = tuple[bytes, int, int]
"""Who keeps a stream's limits, since when it has begun, and since when the node that asks it has."""

_UNKNOWN = Held(1 << 62, 1 << 62, -(1 << 62))  # more than any limit


@dataclass(frozen=True, slots=True, eq=False)
class LetIn:
    """What a client of this node was let in with, by whom, and has not brought yet."""

    whole: Whole
    keeper: Keeper
    rows: int
    nbytes: int


@dataclass(slots=True)
class _Part:
    """What a part last told of itself, and what it was brought since: at which of its changes, rows and bytes."""

    told: pm.Holds
    brought: list[tuple[int, int, int]] = field(default_factory=list)


class _Ledger:
    """What one stream holds, where this node keeps its limits."""

    def __init__(self, whole: Whole, wholes: Wholes) -> None:
        self.parts: dict[bytes, _Part] = {}
        self.admission = Admission(whole.settings, self._held)
        self._wholes = wholes

    def missing(self) -> list[bytes]:
        """The members that have not told what they hold since they know the same members."""
        view, parts = self._wholes.view, self.parts
        return [n for n in self._wholes.members if n not in parts or parts[n].told.members != view]

    def _held(self) -> Held:
        if self.missing():
            return _UNKNOWN
        rows = sum(part.told.rows + sum(b[1] for b in part.brought) for part in self.parts.values())
        nbytes = sum(part.told.nbytes + sum(b[2] for b in part.brought) for part in self.parts.values())
        oldest = [part.told.oldest for part in self.parts.values() if part.told.oldest is not None]
        return Held(rows, nbytes, min(oldest, default=None))

    def tell(self, told: pm.Holds) -> None:
        """A part tells what it holds."""
        part = self.parts.setdefault(told.node, _Part(told))
        part.told = told
        part.brought = [brought for brought in part.brought if brought[0] > told.changes]
        self.admission.let_in()

    def give_back(self, ticket: int, brought: list[tuple[bytes, int, int, int]]) -> None:
        """What was let in has come, and was brought to these parts; or it does not come."""
        for node, changes, rows, nbytes in brought:
            part = self.parts.get(node)
            if part is not None and changes > part.told.changes:
                part.brought.append((changes, rows, nbytes))
        self.admission.give_back(ticket)

    @property
    def behind(self) -> list[str]:
        """The tasks that the parts wait for."""
        return list(dict.fromkeys(name for part in self.parts.values() for name in part.told.behind))


class Limits:
    """The streams with limits, as one node keeps them or tells of its parts of them."""

    def __init__(self, wholes: Wholes, asking: Asking, coming: Callable[[Whole], tuple[int, int]]) -> None:
        """`coming(whole)`: rows and bytes that this node is about to announce to new homes."""
        self._wholes = wholes
        self._coming = coming
        self._asking = asking
        self._ledgers: dict[bytes, _Ledger] = {}  # by the token of the whole
        self._telling: dict[bytes, asyncio.Task[None]] = {}
        self._let_in: set[LetIn] = set()  # from here
        self._counted: dict[bytes, int] = {}  # by the token of the whole: up to which of its changes a part has told
        self._more = asyncio.Event()

    def home(self, whole: Whole) -> bytes:
        """The node that keeps the stream's limits."""
        return self._wholes.placement.home("", whole.name)

    # who is let in from here

    def keeper(self, whole: Whole) -> Keeper:
        """Who is to be asked now."""
        home = self.home(whole)
        return (home, self._wholes.since(home), self._wholes.since(self._wholes.node))

    def let_in(self, whole: Whole, keeper: Keeper, rows: int, nbytes: int) -> LetIn:
        """A client was let in with so much by `keeper`. Once another keeps the limits, that counts here until it is
        `over`."""
        came = LetIn(whole, keeper, rows, nbytes)
        self._let_in.add(came)
        return came

    def over(self, came: LetIn) -> None:
        """What was let in has come, or does not. Where another keeps the limits by now, it counts here until that has
        heard of it from where it came to."""
        if came.keeper == self.keeper(came.whole):
            self._let_in.discard(came)
        else:
            asyncio.get_running_loop().call_later(_COUNTED_S, self._forget, came)

    def _forget(self, came: LetIn) -> None:
        self._let_in.discard(came)
        came.whole.stream.wake()

    # where the limits are kept

    async def admit(self, client: object, request: m.Admit, whole: Whole, deadline: Deadline) -> int:
        """A ticket for so many rows and bytes. Raises Backpressure, LimitExceeded, Closed, PeerUnavailable."""
        ledger = self._ledgers.setdefault(whole.token, _Ledger(whole, self._wholes))
        admitted: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        entry = Entry(
            client, request.rows, request.nbytes, request.version, admitted.set_result, admitted.set_exception
        )
        try:
            async with asyncio.timeout(deadline.remaining_s):
                await self._complete(whole, ledger)
                whole.stream.home.check_open()
                ledger.admission.enter(entry)
                return await asyncio.shield(admitted)
        except BaseException as error:
            if admitted.done() and not admitted.cancelled() and admitted.exception() is None:
                ledger.admission.give_back(admitted.result())
            why = ledger.admission.full(entry) or "others before it"
            ledger.admission.withdraw(entry)
            if isinstance(error, TimeoutError):
                behind = ledger.behind
                why = f"{why}; it waits for {', '.join(behind)}" if behind else why
                holders = tuple(
                    {"holder": f"task {name!r} of stream {whole.name!r}", "bytes": 0, "how": "not consumed"}
                    for name in behind
                )
                raise Backpressure(
                    f"the stream {whole.name!r} is full ({why})",
                    needed=request.nbytes,
                    waited_s=deadline.waited_s,
                    holders=holders,
                ) from None
            raise

    async def _complete(self, whole: Whole, ledger: _Ledger) -> None:
        """Wait until every member has told what its part holds."""
        while True:
            await self._wholes.parts(whole)  # who had none has one now, and tells of it
            missing = ledger.missing()
            if not missing:
                return
            if self._wholes.node in missing:
                ledger.tell(self._holds(whole))
                continue
            try:
                async with asyncio.timeout(_AGAIN_S):
                    await self._more.wait()
            except TimeoutError:
                continue

    def give_back(self, whole: Whole, ticket: int, brought: list[tuple[bytes, int, int, int]]) -> None:
        """As `_Ledger.give_back`."""
        ledger = self._ledgers.get(whole.token)
        if ledger is not None:
            ledger.give_back(ticket, brought)

    def told(self, told: pm.Holds) -> None:
        """A part tells what it holds."""
        whole = self._wholes.named(told.name)
        if told.node not in self._wholes.members:
            raise PeerUnavailable("who tells is no member here, yet; it tells again")
        if whole is not None and whole.generation == told.generation:
            self._ledgers.setdefault(whole.token, _Ledger(whole, self._wholes)).tell(told)
            more, self._more = self._more, asyncio.Event()
            more.set()

    def leave(self, client: object) -> None:
        """The client has gone: it waits no longer, and what it was admitted to bring does not come."""
        for ledger in self._ledgers.values():
            ledger.admission.leave(client)

    # where the parts are

    def begin(self, whole: Whole) -> None:
        """There is a part of this stream here: whoever keeps its limits is told what it holds, from now on."""
        if whole.settings.limited:
            self._telling[whole.token] = asyncio.get_running_loop().create_task(self._tell(whole))

    async def _tell(self, whole: Whole) -> None:
        said: tuple[bytes, pm.Holds] | None = None
        while self._wholes.there(whole):
            home, holds = self.home(whole), self._holds(whole)
            if said is None or said != (home, msgspec.structs.replace(holds, id=said[1].id)):
                try:
                    if home == self._wholes.node:
                        self.told(holds)
                    else:
                        await self._asking.tell(home, holds, m.Done, _AGAIN_S)
                    said = (home, holds)
                    self._counted[whole.token] = holds.changes
                    more, self._more = self._more, asyncio.Event()
                    more.set()
                    continue
                except DataplaneError:
                    await asyncio.sleep(_AGAIN_S)
                    continue
            await whole.stream.changed()

    async def counted(self, name: str, answer: Awaitable[pm.Announced] | pm.Announced) -> pm.Announced:
        """The answer to rows that came here, once whoever keeps the limits counts them here: then they go elsewhere."""
        reply = answer if isinstance(answer, pm.Announced) else await answer
        whole = self._wholes.named(name)
        if whole is None or not whole.settings.limited:
            return reply
        changes = whole.stream.home.changes
        with suppress(TimeoutError):
            async with asyncio.timeout(_COUNTED_S):
                while self._wholes.there(whole) and self._counted.get(whole.token, -1) < changes:
                    await self._more.wait()
        return reply

    def _holds(self, whole: Whole) -> pm.Holds:
        home = whole.stream.home
        rows, nbytes = self._coming(whole)
        keeper = self.keeper(whole)
        before = [came for came in self._let_in if came.whole is whole and came.keeper != keeper]
        oldest = min((min(left) for left in home.books.progress.left if left), default=None)
        return pm.Holds(
            self._asking.next_id(),
            self._wholes.node,
            name=whole.name,
            generation=whole.generation,
            changes=home.changes,
            rows=home.books.rows.count + rows + sum(came.rows for came in before),
            nbytes=home.books.nbytes + nbytes + sum(came.nbytes for came in before),
            oldest=oldest,
            behind=home.books.behind(),
            members=self._wholes.view,
        )

    def changed(self) -> None:
        """Members have come or gone: what those tell who are there counts, and is told to who keeps the limits now."""
        for ledger in self._ledgers.values():
            for node in [node for node in ledger.parts if node not in self._wholes.members]:
                del ledger.parts[node]
        for whole in self._wholes.all():
            whole.stream.wake()

    def dropped(self, whole: Whole) -> None:
        """The stream was dropped."""
        ledger = self._ledgers.pop(whole.token, None)
        if ledger is not None:
            ledger.admission.refuse(Closed("the stream was dropped"))
        self._counted.pop(whole.token, None)
        self._let_in = {came for came in self._let_in if came.whole is not whole}
        task = self._telling.pop(whole.token, None)
        if task is not None:
            task.cancel()

    def begin_anew(self) -> None:
        """What is known here of limits is of before; who waits asks again."""
        for ledger in self._ledgers.values():
            ledger.admission.refuse(PeerUnavailable("this node begins anew: others had taken it for dead"))
        self._ledgers.clear()
        self._counted.clear()
        for task in self._telling.values():
            task.cancel()
        for whole in self._wholes.all():
            self.begin(whole)

    async def aclose(self) -> None:
        """The node stops."""
        tasks = list(self._telling.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
