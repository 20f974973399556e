"""The conformance suite of samplers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest

from dataplane.errors import Misuse
from dataplane.stream.sampler import Candidates, Choice, Sampler, checked
from dataplane.testing.samples import candidates

WANTS = (1, 3, 8, 64)


class SamplerSuite:
    """Tests that a sampler chooses validly. A subclass has a name that begins with Test, and a method `made`, which
    returns a new sampler.

    The candidates have lengths of the columns in the sampler's `needs`; `prepared` adds the tags that it reads. Rows
    come in groups of `group_size`, so that a sampler of whole groups has something to choose.
    """

    group_size = 4
    raises_misuse = False
    """Whether it may refuse a `want` by `Misuse`, as one does whose groups do not fit."""

    def made(self) -> Sampler:
        raise NotImplementedError

    def prepared(self, shown: Candidates) -> Candidates:
        """The candidates with the tags that this sampler reads; unchanged by default. `dataclasses.replace(shown,
        tags={...})` adds some."""
        return shown

    def shown(self, rows: int, seed: int, *, closed: bool = False, whole: bool = True) -> Candidates:
        """Candidates in a random order of `seed`, some of whose groups lack rows."""
        rng = np.random.default_rng(seed)
        groups = [number for number in range(-(-rows // self.group_size)) for _ in range(self.group_size)]
        order = rng.permutation(len(groups))[:rows]
        return self.prepared(
            candidates(
                [groups[i] for i in order],
                version=sorted(rng.integers(0, 5, rows).tolist()),
                age_s=sorted(rng.uniform(0, 100, rows).tolist(), reverse=True),
                lengths={name: rng.integers(1, 100, rows).tolist() for name in getattr(self.made(), "needs", ())},
                group_rows=dict.fromkeys(groups, self.group_size),
                closed=closed,
                whole=whole,
            )
        )

    def samples(self) -> Iterator[tuple[Candidates, int]]:
        """The inputs of the tests: candidates, and the number of rows wanted."""
        for rows in (1, 7, 16, 200):
            for want in WANTS:
                yield self.shown(rows, rows), want
                yield self.shown(rows, rows + 1, closed=True), want
        yield self.shown(200, 3, whole=False), 64

    def chosen(self, sampler: Sampler, shown: Candidates, want: int) -> Choice | None:
        """A choice, validated as by a stream, or None if the sampler refused `want` and may."""
        try:
            return checked(sampler.choose(shown, want), shown, want)
        except Misuse:
            if self.raises_misuse:
                return None
            raise

    def test_a_choice_is_valid(self) -> None:
        """At most `want` positions among the candidates, each once, none both chosen and expired."""
        sampler = self.made()
        for shown, want in self.samples():
            self.chosen(sampler, shown, want)

    def test_the_same_candidates_give_the_same_choice(self) -> None:
        """Also from another sampler with equal settings, and after other choices: a choice does not depend on earlier
        ones."""
        sampler = self.made()
        shown = self.shown(200, 1)
        first = self.chosen(sampler, shown, 64)
        for other, want in self.samples():
            self.chosen(sampler, other, want)
        for again in (self.chosen(sampler, shown, 64), self.chosen(self.made(), shown, 64)):
            assert (first is None) == (again is None)
            if first is not None and again is not None:
                assert first.rows.tolist() == again.rows.tolist()
                assert sorted(first.expired.tolist()) == sorted(again.expired.tolist())

    def test_candidates_stay_as_they_are(self) -> None:
        """The arrays are read-only here: a sampler that writes to them fails."""
        sampler = self.made()
        shown = self.shown(200, 2)
        before = copy.deepcopy(shown)
        self.chosen(sampler, shown, 64)
        for name in ("group", "version", "age_s", "group_rows", "group_dropped"):
            assert np.array_equal(getattr(shown, name), getattr(before, name)), name

    def test_of_no_rows_none_is_chosen(self) -> None:
        for closed in (False, True):
            choice = self.chosen(self.made(), self.shown(0, 0, closed=closed), 8)
            assert choice is None or (len(choice.rows) == 0 and len(choice.expired) == 0)

    def test_something_is_chosen_or_expires(self) -> None:
        """For a closed stream with complete groups, so that its consumers reach the end."""
        rows = 4 * self.group_size
        choice = self.chosen(self.made(), self.shown(rows, 5, closed=True), rows)
        assert choice is not None
        assert len(choice.rows) + len(choice.expired) > 0

    def test_what_it_reads_is_named(self) -> None:
        """`needs` names columns and `tags_read` tags; a sampler may lack either."""
        sampler = self.made()
        for name in ("needs", "tags_read"):
            named = getattr(sampler, name, ())
            assert not isinstance(named, str), name
            assert all(isinstance(each, str) and each for each in named), name

    def test_no_class_stands_for_a_sampler(self) -> None:
        sampler = self.made()
        assert not isinstance(sampler, type)
        with pytest.raises(TypeError):
            sampler.choose()  # type: ignore[call-arg]
