"""Samplers: choose which of the ready rows a task is given next. Pure functions over arrays.

The leader of a stream calls a sampler with the ready rows in the order they were appended. A sampler keeps nothing
between calls, reads no clock and changes nothing: equal candidates give equal choices. The leader leases the chosen
rows and expires those that the sampler gave up for the task; all others are candidates again next time.

Users may pass any object that has `choose`, which then runs in the consuming process; `checked` validates its
answer. The built-in samplers are messages: they are sent to the leader with their arguments, and no code is. None of
them loops over rows in Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from dataplane.batch.field import is_text
from dataplane.batch.rows import Index
from dataplane.errors import Misuse

_BIG = 1 << 63  # integers up to it fit a message

Floats: TypeAlias = npt.NDArray[np.float64]


def _no_rows() -> Index:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The rows that are ready for a task, in the order they were appended. Each array has a value for each row."""

    #: The number of the row's group. Rows without a group have one of their own each.
    group: Index
    #: The policy version that made the row.
    version: Index
    #: Seconds since the row was appended.
    age_s: Floats
    #: Rows that the row's group has in the stream now, ready or not; those dropped are not counted.
    group_rows: Index
    #: Rows of the row's group that were dropped.
    group_dropped: Index
    #: By column that the sampler `needs`, how long the first dimension of each row is.
    lengths: Mapping[str, Index]
    #: By tag, the value of each row: an array of integers, floats, strings or objects.
    tags: Mapping[str, npt.NDArray[Any]]
    #: The newest policy version that was appended.
    latest: int
    #: No more rows will be appended.
    closed: bool
    #: These are all that are ready. False: there are more.
    whole: bool

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Positions among the candidates."""

    #: Those to deliver, in this order, each once.
    rows: Index
    #: Those never to be delivered to this task.
    expired: Index = field(default_factory=_no_rows)
    #: No more fit, though there are more: these are delivered even if they are fewer than was asked for at least.
    full: bool = False


class Sampler(Protocol):
    """What chooses which of a task's ready rows a consumer is given: any object with `choose`.

    One of the user's own runs in the process that consumes, in its event loop, each time that rows may have become
    ready: it must be quick, and not block, nor keep or change what it is given. The same candidates should give the
    same choice. What it raises, the call that consumes raises.

    Attributes, all optional:

    - `needs`: a tuple of the columns whose lengths it reads, `candidates.lengths[name]`; rows that lack one are not
      shown;
    - `tags_read`: a tuple of the tags that it reads, `candidates.tags[name]`;
    - `judges_age`: True where its choice depends on `age_s`: then it is asked again as time passes;
    - `state_dict` and `load_state_dict`: what a loader saves of it with its own state, and gives it back.

    A base class is not needed. `dataplane.testing.SamplerSuite` has the tests that one should pass.
    """

    def choose(self, candidates: Candidates, want: int, /) -> Choice | npt.ArrayLike:
        """At most `want` positions among the candidates, each once, in the order of delivery: an array or list of
        integers, or a `Choice`, which can name rows to expire too. None at all means to wait for more rows."""


class _BuiltIn(msgspec.Struct, frozen=True, array_like=True):
    """Base class of the samplers that are sent to the leader."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns whose lengths the candidates must have."""
        return ()

    @property
    def tags_read(self) -> tuple[str, ...]:
        """The tags that the candidates must have."""
        return ()

    @property
    def group_size(self) -> int | None:
        """The size of the groups that are delivered whole; None if none are."""
        return None

    @property
    def judges_age(self) -> bool:
        """Whether the choice may change as time passes."""
        return False

    @property
    def sees_all(self) -> bool:
        """Whether it needs all ready rows as candidates, and not just the oldest ones."""
        return False


class Fifo(_BuiltIn, frozen=True, tag="fifo"):
    """The rows that were appended first."""

    def choose(self, candidates: Candidates, want: int) -> Choice:
        return Choice(np.arange(min(want, len(candidates)), dtype=np.int64))


class CompleteGroups(_BuiltIn, frozen=True, tag="groups"):
    """Whole groups of `size` rows, their rows side by side, the group that came first first.

    A group is complete when all the rows it has are ready and there are `size` of them, counting those dropped. It is
    never cut: where the next does not fit into `want`, fewer rows come, and count as enough. A group that can no longer
    be completed, because the stream is closed, expires; with `timeout`, so does one that is incomplete and whose first
    ready row was appended more than `timeout` seconds ago.

    Raises Misuse where the first complete group alone is more rows than `want`.
    """

    size: int
    timeout: float | None = None

    def __post_init__(self) -> None:
        _whole_number("CompleteGroups: size", self.size, least=1)
        if self.timeout is not None:
            _amount("CompleteGroups: timeout", self.timeout)

    @property
    def group_size(self) -> int | None:
        return self.size

    @property
    def judges_age(self) -> bool:
        return self.timeout is not None

    def choose(self, candidates: Candidates, want: int) -> Choice:
        groups = _Groups.of(candidates.group)
        ready, total = groups.counts, candidates.group_rows[groups.first]
        dropped = candidates.group_dropped[groups.first]
        complete = (ready == total) & (ready + dropped >= self.size)
        too_few = total + dropped < self.size
        expired = too_few & candidates.closed
        if self.timeout is not None:
            # What looks incomplete may have its other ready rows beyond these candidates, unless it is too few anyway.
            incomplete = ~complete if candidates.whole else too_few
            expired |= incomplete & (candidates.age_s[groups.first] > self.timeout)
        in_order = np.flatnonzero(complete)
        in_order = in_order[np.argsort(groups.first[in_order])]
        fit = int(np.searchsorted(np.cumsum(ready[in_order]), want, side="right"))
        if not fit and len(in_order):
            rows = int(ready[in_order[0]])
            raise Misuse(f"a group of {rows} rows is delivered whole: ask for {rows} rows or more, not {want}")
        chosen, stale = groups.rows_of(in_order[:fit]), np.sort(groups.rows_of(np.flatnonzero(expired)))
        return Choice(chosen, stale, full=fit < len(in_order))


class Freshest(_BuiltIn, frozen=True, tag="freshest"):
    """The rows of the newest policy version, then those of the next; in a version, those appended first.

    Rows more than `max_lag` versions behind the newest that was appended expire. With `max_age`, rows that came more
    than so many seconds ago are delivered before all others, the oldest first: those of slow prompts, of versions that
    others have passed, do not wait until they expire.
    """

    max_lag: int
    max_age: float | None = None

    def __post_init__(self) -> None:
        _whole_number("Freshest: max_lag", self.max_lag, least=0)
        if self.max_age is not None:
            _amount("Freshest: max_age", self.max_age)

    @property
    def judges_age(self) -> bool:
        return self.max_age is not None

    @property
    def sees_all(self) -> bool:
        return True

    def choose(self, candidates: Candidates, want: int) -> Choice:
        stale = candidates.version < candidates.latest - self.max_lag
        fresh = np.flatnonzero(~stale)
        newest_first = np.argsort(-candidates.version[fresh], kind="stable")
        if self.max_age is not None:
            age_s = candidates.age_s[fresh][newest_first]
            waited = np.flatnonzero(age_s > self.max_age)
            waited = waited[np.argsort(-age_s[waited], kind="stable")]
            newest_first = newest_first[np.concatenate((waited, np.flatnonzero(age_s <= self.max_age)))]
        return Choice(fresh[newest_first[:want]], np.flatnonzero(stale))


class Weighted(_BuiltIn, frozen=True, tag="weighted"):
    """Rows whose values of a tag come in proportion to `weights`, evenly mixed; of one value, those appended first.

    Each value's share of `want` is rounded up or down, so that over many deliveries it is right on average, also of a
    value whose share is less than a row (systematic sampling, Madow 1949; drawn from `seed` and the candidates). What
    a value cannot fill goes to the others by their weights. Rows whose value has no weight, or 0, are left where they
    are.

    Raises Misuse where the candidates lack the tag.
    """

    tag: str
    weights: dict[bool | int | float | str, float]
    seed: int = 0

    def __post_init__(self) -> None:
        _name("Weighted: tag", self.tag)
        if not isinstance(self.weights, Mapping):
            raise Misuse(f"Weighted: weights are a mapping of values to weights, not a {type(self.weights).__name__}")
        # A copy, of Python's own values: NumPy's do not cross a socket, and the caller's mapping may change.
        own = {value.item() if isinstance(value, np.generic) else value: w for value, w in self.weights.items()}
        for value, weight in own.items():
            fits = is_text(value) if isinstance(value, str) else not isinstance(value, int) or -_BIG <= value < _BIG
            if not isinstance(value, bool | int | float | str) or not fits:
                raise Misuse(f"Weighted: a weight is for an integer, float or string, not for {value!r}")
            _amount(f"Weighted: the weight of {value!r}", weight)
        if not any(own.values()):
            raise Misuse("Weighted: no weight is above 0")
        msgspec.structs.force_setattr(self, "weights", {value: float(weight) for value, weight in own.items()})
        _whole_number("Weighted: seed", self.seed, least=0)

    @property
    def tags_read(self) -> tuple[str, ...]:
        return (self.tag,)

    def choose(self, candidates: Candidates, want: int) -> Choice:
        tags = candidates.tags.get(self.tag)
        if tags is None:
            raise Misuse(f"the rows have no tag {self.tag!r}, only {', '.join(sorted(candidates.tags)) or 'none'}")
        values = {value: weight for value, weight in self.weights.items() if weight}
        rows = [np.flatnonzero(_equal(tags, value))[:want] for value in values]
        draw = (xxhash.xxh3_64_intdigest(candidates.group.tobytes(), seed=self.seed) >> 11) / (1 << 53)
        have = np.array([len(of) for of in rows], np.int64)
        shares = _shares(want, np.array(list(values.values())), have, draw)
        return Choice(_mixed([of[:share] for of, share in zip(rows, shares.tolist(), strict=True)]))


class TokenBalanced(_BuiltIn, frozen=True, tag="balanced"):
    """The rows that `within` chooses (Fifo where it is None), to be split over shards of about as many tokens each.

    A delivery as a whole is the same with or without it. Who takes the delivery splits it: see `balance.balanced`,
    over the lengths of `column` and as many `shards`.
    """

    column: str
    shards: int
    within: Fifo | CompleteGroups | Freshest | Weighted | None = None

    def __post_init__(self) -> None:
        _name("TokenBalanced: column", self.column)
        _whole_number("TokenBalanced: shards", self.shards, least=1)
        if not isinstance(self.within, Fifo | CompleteGroups | Freshest | Weighted | None):
            raise Misuse(f"TokenBalanced: within is another of the built-in samplers, not {self.within!r}")

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def tags_read(self) -> tuple[str, ...]:
        return self.within.tags_read if self.within is not None else ()

    @property
    def group_size(self) -> int | None:
        return self.within.group_size if self.within is not None else None

    @property
    def judges_age(self) -> bool:
        return self.within is not None and self.within.judges_age

    @property
    def sees_all(self) -> bool:
        return self.within is not None and self.within.sees_all

    def choose(self, candidates: Candidates, want: int) -> Choice:
        return (self.within if self.within is not None else Fifo()).choose(candidates, want)


#: The samplers that a leader in another process can be told to use; the type to decode one as.
BuiltIn: TypeAlias = Fifo | CompleteGroups | TokenBalanced | Freshest | Weighted


def checked(choice: Choice | npt.ArrayLike, candidates: Candidates, want: int) -> Choice:
    """What a sampler returned, as a Choice of int64 arrays. A list or array of positions is a choice of these rows.

    Raises Misuse, saying what is wrong, unless there are at most `want` rows, all positions are integers among the
    candidates, and none is there twice, be it among the rows, the expired, or one of each.
    """
    if not isinstance(choice, Choice):
        choice = Choice(_positions(choice, "chose", len(candidates)))
    rows = _positions(choice.rows, "chose", len(candidates))
    expired = _positions(choice.expired, "let expire", len(candidates))
    if len(rows) > want:
        raise Misuse(f"the sampler chose {len(rows)} rows where at most {want} were wanted")
    both = np.intersect1d(rows, expired, assume_unique=True)
    if len(both):
        raise Misuse(f"the sampler chose row {both[0]} and let it expire as well")
    return Choice(rows, expired, choice.full is True)


def _positions(positions: npt.ArrayLike, did: str, candidates: int) -> Index:
    try:
        array = np.asarray(positions)
    except (TypeError, ValueError) as error:
        raise Misuse(f"the sampler {did} what is no array of positions: {error}") from error
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        hint = "; np.flatnonzero makes positions of flags" if array.dtype.kind == "b" else ""
        raise Misuse(f"the sampler {did} no flat array of integers but {array.dtype} of shape {array.shape}{hint}")
    if not array.size:
        return _no_rows()
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= candidates:
        raise Misuse(f"the sampler {did} row {low if low < 0 else high} of {candidates} candidates")
    array = array.astype(np.int64, copy=False)
    times = np.bincount(array)
    if len(array) > np.count_nonzero(times):
        row = int(times.argmax())
        raise Misuse(f"the sampler {did} row {row} {times[row]} times")
    return array


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Candidates by group. `order` has the rows of each group side by side, in order of arrival."""

    order: Index
    starts: Index  # by group, where its rows begin in `order`
    counts: Index  # by group, its rows
    first: Index  # by group, the row that arrived first

    @classmethod
    def of(cls, group: Index) -> _Groups:
        order = _stable_order(group)
        ordered = group[order]
        changes = np.ones(len(group), bool)
        np.not_equal(ordered[1:], ordered[:-1], out=changes[1:])
        starts = np.flatnonzero(changes)
        return cls(order, starts, np.diff(starts, append=len(group)), order[starts])

    def rows_of(self, groups: Index) -> Index:
        """The rows of these groups, one group after the other."""
        counts = self.counts[groups]
        before = np.cumsum(counts) - counts
        rows: Index = self.order[np.repeat(self.starts[groups] - before, counts) + np.arange(counts.sum())]
        return rows


def _stable_order(values: Index) -> Index:
    """As np.argsort(values, kind="stable"); the values' range permitting, by sorting numbers that have the position
    in them, which takes a third of the time where 100,000 values are in no order."""
    n = len(values)
    least = int(values.min(initial=0))
    if (int(values.max(initial=0)) - least + 1) * n >= 1 << 63:
        return np.argsort(values, kind="stable")
    positioned = (values - least) * n + np.arange(n)
    positioned.sort()
    order: Index = positioned % max(n, 1)
    return order


def _equal(tags: npt.NDArray[Any], value: bool | int | float | str) -> npt.NDArray[np.bool_]:
    """Which rows have the value. Text is never equal to a number, whatever NumPy makes of comparing them."""
    if tags.dtype.kind != "O" and isinstance(value, str) != (tags.dtype.kind in "UT"):
        return np.zeros(len(tags), bool)
    return np.asarray(tags == value, bool)


def _shares(want: int, weights: Floats, have: Index, draw: float) -> Index:
    """How many rows each value gives to `want`, none more than it has. `draw`, from 0 to 1, is the chance in it."""
    shares = np.zeros_like(have)
    unsettled = np.ones(len(have), bool)
    while unsettled.any() and (left := want - int(shares.sum())):
        relative = np.where(unsettled, weights, 0.0)
        relative /= relative.max()  # or weights near the limits of a float would sum to infinity, or vanish
        quotas = relative * (left / relative.sum())
        short = unsettled & (have <= quotas)
        if not short.any():
            # One of the marks draw, draw + 1, ... for each row: a run of quota q catches q of them on average.
            ends = np.cumsum(quotas)
            ends[np.flatnonzero(quotas)[-1] :] = left
            shares += np.diff(np.floor(ends + draw), prepend=0.0).astype(np.int64)
            break
        shares[short] = have[short]
        unsettled &= ~short
    return shares


def _mixed(parts: list[Index]) -> Index:
    """The rows of all parts such that any run of rows has about the same proportions as the whole."""
    due = np.concatenate([(np.arange(len(part)) + 0.5) / max(len(part), 1) for part in parts])
    rows: Index = np.concatenate(parts)
    return rows[np.lexsort((rows, due))]


def _name(what: str, value: object) -> None:
    if not is_text(value) or not value:
        raise Misuse(f"{what} is a name, not {value!r}")


def _whole_number(what: str, value: object, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 62:
        raise Misuse(f"{what} is a whole number, {least} or more, not {value!r}")


def _amount(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise Misuse(f"{what} is a number, 0 or more, not {value!r}")
