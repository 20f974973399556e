"""Samplers choose the rows that a task is given next, among the ready ones. They are pure functions over arrays.

The leader of a stream calls a sampler with the ready rows in the order they were appended. A sampler has no state,
reads no clock and changes nothing: equal candidates give equal choices. The leader leases the chosen rows, and expires
for this task those that the sampler marks as expired; all others are candidates again next time.

Users may pass any object that has `choose`, which then runs in the consuming process; `checked` validates its
answer. The built-in samplers are messages: their arguments are sent to the leader, without code. None of them loops
over rows in Python.
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

_BIG = 1 << 63  # integers up to this fit into a message

Floats: TypeAlias = npt.NDArray[np.float64]


def _no_rows() -> Index:
    return np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The rows that are ready for a task, in the order they were appended.

    Arrays with a value for each row:

    - `group`: the number of the row's group; a row without a group is in one of its own;
    - `version`: the policy version that made the row;
    - `age_s`: seconds since the row was appended;
    - `group_rows`: number of rows of the row's group that the task has not done, ready or not, without dropped rows
      and dead letters;
    - `group_dropped`: number of dropped rows and dead letters of the row's group;
    - `lengths[name]`: for each column that the sampler `needs`, the length of the row's first dimension;
    - `tags[name]`: for each of its `tags_read`, the value of the row: integers, floats, strings or objects.

    Of the stream:

    - `latest`: the newest policy version that was appended;
    - `closed`: whether no more rows will be appended;
    - `whole`: whether these are all ready rows.
    """

    group: Index
    version: Index
    age_s: Floats
    group_rows: Index
    group_dropped: Index
    lengths: Mapping[str, Index]
    tags: Mapping[str, npt.NDArray[Any]]
    latest: int
    closed: bool
    whole: bool

    def __len__(self) -> int:
        return len(self.group)


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """Positions among the candidates.

    - `rows`: the rows to deliver, in this order, each once;
    - `expired`: the rows that expire: they are never delivered to this task;
    - `full`: True if the sampler could add no further row to this delivery, so that it is sent even below the requested
      minimum.
    """

    rows: Index
    expired: Index = field(default_factory=_no_rows)
    full: bool = False


class Sampler(Protocol):
    """Chooses the rows that a consumer is given, among the ready rows of a task. Any object with `choose` is one.

    A user's sampler runs in the consuming process, in its event loop, each time that rows may have become ready. It
    must be quick and must not block, nor keep or change its candidates. The same candidates should give the same
    choice. The consuming call raises its errors.

    Attributes, all optional:

    - `needs`: a tuple of the columns whose lengths it reads, `candidates.lengths[name]`; rows that lack one are not
      candidates;
    - `tags_read`: a tuple of the tags that it reads, `candidates.tags[name]`;
    - `judges_age`: True if its choice depends on `age_s`: then it is called again as time passes;
    - `state_dict` and `load_state_dict`: a loader saves and restores its state by these, with its own.

    A base class is not needed. `dataplane.testing.SamplerSuite` has the tests that one should pass.
    """

    def choose(self, candidates: Candidates, want: int, /) -> Choice | npt.ArrayLike:
        """At most `want` positions among the candidates, each once, in the order of delivery: an array or list of
        integers, or a `Choice`, which can name rows to expire too. An empty choice means to wait for more rows."""


class _BuiltIn(msgspec.Struct, frozen=True, array_like=True):
    """Base class of the samplers that are sent to the leader."""

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that candidates must have, because the sampler reads their lengths."""
        return ()

    @property
    def tags_read(self) -> tuple[str, ...]:
        """The tags that the sampler reads."""
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
        """Whether the sampler needs all ready rows as candidates, not only the oldest ones."""
        return False


class Fifo(_BuiltIn, frozen=True, tag="fifo"):
    """The rows that were appended first."""

    def choose(self, candidates: Candidates, want: int) -> Choice:
        return Choice(np.arange(min(want, len(candidates)), dtype=np.int64))


class CompleteGroups(_BuiltIn, frozen=True, tag="groups"):
    """Whole groups of `size` rows, their rows side by side, the oldest group first.

    A group is complete when all of its rows are ready and there are `size` of them, counting dropped ones. It is never
    cut: if the next group does not fit into `want`, fewer rows are delivered, even fewer than the requested minimum. A
    group that can no longer be completed, because the stream is closed, expires. With `timeout`, an incomplete group
    expires too once its first ready row was appended more than `timeout` seconds ago.

    Raises Misuse if the first complete group alone has more rows than `want`.
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
            # Without all candidates, the missing rows of a group may be ready, unless it has too few in the stream.
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
    """The rows of the newest policy version, then those of the next; in a version, the oldest first.

    Rows more than `max_lag` versions behind the newest that was appended expire. With `max_age`, rows that were
    appended more than `max_age` seconds ago are delivered before all others, the oldest first, so that rows of slow
    prompts, which have older versions, do not wait until they expire.
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
    """Rows with values of a tag in proportion to `weights`, evenly mixed; of one value, the oldest first.

    Each value's share of `want` is rounded up or down, so that it is right on average over many deliveries, also for a
    value whose share is less than a row (systematic sampling, Madow 1949). Equal candidates and `seed` give equal
    choices. If a value has too few rows, the others fill its share by their weights. Rows whose value has no weight, or
    0, stay pending.

    Raises Misuse if no candidate has the tag.
    """

    tag: str
    weights: dict[bool | int | float | str, float]
    seed: int = 0

    def __post_init__(self) -> None:
        _name("Weighted: tag", self.tag)
        if not isinstance(self.weights, Mapping):
            raise Misuse(f"Weighted: weights are a mapping of values to weights, not a {type(self.weights).__name__}")
        # A copy with Python's own values: NumPy's cannot be sent, and the caller's mapping may change.
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
    """The rows that `within` chooses (Fifo if None), to be split over shards with about the same number of tokens.

    The delivery has the same rows as with `within` alone. Its `split` divides them into `shards` parts by the lengths
    of `column`. `within` is a built-in sampler, because it runs in the node. With a sampler of your own, `split` makes
    runs of nearly equal numbers of rows; to balance tokens, give each rank `delivery.ref[positions]` with positions of
    your own.
    """

    column: str
    shards: int
    within: Fifo | CompleteGroups | Freshest | Weighted | None = None

    def __post_init__(self) -> None:
        _name("TokenBalanced: column", self.column)
        _whole_number("TokenBalanced: shards", self.shards, least=1)
        if not isinstance(self.within, Fifo | CompleteGroups | Freshest | Weighted | None):
            raise Misuse(
                f"TokenBalanced: within is another of the built-in samplers, since it runs in the node, not"
                f" {self.within!r}: with a sampler of your own, give each rank delivery.ref[positions]"
            )

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


#: The samplers that can be sent to a leader, as the type that decodes them.
BuiltIn: TypeAlias = Fifo | CompleteGroups | TokenBalanced | Freshest | Weighted


def checked(choice: Choice | npt.ArrayLike, candidates: Candidates, want: int) -> Choice:
    """The answer of a sampler, as a Choice of int64 arrays. A list or array of positions is a choice of these rows.

    Raises Misuse, with the reason, unless there are at most `want` rows, and all positions are integers among the
    candidates, each at most once in `rows` and `expired` together.
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
    starts: Index  # by group, the position of its first row in `order`
    counts: Index  # by group, its number of rows
    first: Index  # by group, its oldest row

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
    """As np.argsort(values, kind="stable"). If the range of the values permits, numbers that include the position are
    sorted, which takes a third of the time for 100,000 unordered values."""
    n = len(values)
    least = int(values.min(initial=0))
    if (int(values.max(initial=0)) - least + 1) * n >= 1 << 63:
        return np.argsort(values, kind="stable")
    positioned = (values - least) * n + np.arange(n)
    positioned.sort()
    order: Index = positioned % max(n, 1)
    return order


def _equal(tags: npt.NDArray[Any], value: bool | int | float | str) -> npt.NDArray[np.bool_]:
    """Flags of the rows that have the value. Text never equals a number here, unlike in some NumPy comparisons."""
    if tags.dtype.kind != "O" and isinstance(value, str) != (tags.dtype.kind in "UT"):
        return np.zeros(len(tags), bool)
    return np.asarray(tags == value, bool)


def _shares(want: int, weights: Floats, have: Index, draw: float) -> Index:
    """The number of rows of each value in `want`, at most its number in `have`. `draw`: a random number in [0, 1)."""
    shares = np.zeros_like(have)
    unsettled = np.ones(len(have), bool)
    while unsettled.any() and (left := want - int(shares.sum())):
        relative = np.where(unsettled, weights, 0.0)
        relative /= relative.max()  # else weights near the limits of a float would sum to infinity, or vanish
        quotas = relative * (left / relative.sum())
        short = unsettled & (have <= quotas)
        if not short.any():
            # Each of the marks draw, draw + 1, ... is a row: an interval of length q contains q of them on average.
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
