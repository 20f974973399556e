"""Limits of a stream over several partitions: quotas that its first partition lends, so that their sum is the limit.

The first partition begins with all of it. Another asks for a loan and takes what it is given into its own log; before
it gives some back, it has lowered its quota in its own log. A loan has a version: what a partition asks for names the
version it has, and is done once. So at any moment each partition has at most what it was lent, whoever leads either.

Bytes and rows that a stream does not limit are lent in any amount, and mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dataplane.stream.settings import Settings


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """What a partition may hold, as of the version."""

    version: int = 0
    rows: int = 0
    nbytes: int = 0


class Quotas:
    """This partition's own loan and, in a stream's first partition, those of the others."""

    __slots__ = ("lent", "own")

    def __init__(self, settings: Settings, partition: int) -> None:
        self.own = Loan(0, settings.max_rows, settings.max_bytes) if not partition else Loan()
        self.lent: dict[int, Loan] = {}

    def configure(self, settings: Settings, partition: int) -> None:
        """The limits are others; what was lent stays so until it is given back."""
        if not partition:
            self._keep_rest(settings)

    def _keep_rest(self, settings: Settings) -> None:
        """The first partition has what is not lent: loans may be decided before others are done, so that none of them
        knows what that is."""
        rows = settings.max_rows - sum(loan.rows for loan in self.lent.values())
        nbytes = settings.max_bytes - sum(loan.nbytes for loan in self.lent.values())
        self.own = Loan(self.own.version, max(rows, 0), max(nbytes, 0))

    def take(self, loan: Loan) -> None:
        """Take a newer loan, or less of the one there is."""
        own = self.own
        lower = loan.version == own.version and loan.rows <= own.rows and loan.nbytes <= own.nbytes
        if lower or loan.version > own.version:
            self.own = loan

    def lend(self, settings: Settings, partition: int, asked: Loan, kept: Loan) -> Loan:
        """Lend as much as is asked under the version that the partition has, if that is within the limits with as much
        as is `kept`; the loan as it is now."""
        now = self.lent.get(partition, Loan())
        if asked.version != now.version:
            return now
        others = [loan for other, loan in self.lent.items() if other != partition]
        rows = sum(loan.rows for loan in others) + asked.rows + kept.rows
        nbytes = sum(loan.nbytes for loan in others) + asked.nbytes + kept.nbytes
        if (settings.max_rows and rows > settings.max_rows) or (settings.max_bytes and nbytes > settings.max_bytes):
            return now
        self.lent[partition] = Loan(now.version + 1, asked.rows, asked.nbytes)
        self._keep_rest(settings)
        return self.lent[partition]

    def reclaim(self, settings: Settings, partitions: Iterable[int]) -> None:
        """These partitions, which are no more, have nothing."""
        for number in partitions:
            self.lent.pop(number, None)
        self._keep_rest(settings)

    def offer(self, settings: Settings, partition: int, wanted: Loan, used: tuple[int, int]) -> tuple[Loan, Loan]:
        """What can be lent of what is wanted, and what is kept then, if `used` is in use here."""
        others = [loan for other, loan in self.lent.items() if other != partition]
        free_rows = settings.max_rows - sum(loan.rows for loan in others)
        free_bytes = settings.max_bytes - sum(loan.nbytes for loan in others)
        now = self.lent.get(partition, Loan())
        rows = min(wanted.rows, max(free_rows - used[0], min(now.rows, wanted.rows)))
        nbytes = min(wanted.nbytes, max(free_bytes - used[1], min(now.nbytes, wanted.nbytes)))
        rows, nbytes = max(rows, 0), max(nbytes, 0)
        return Loan(wanted.version, rows, nbytes), Loan(self.own.version, free_rows - rows, free_bytes - nbytes)
