"""The interface of a cluster's coordinator, implemented by etcd and by this process.

It has three functions: members with leases, values that change by compare-and-set, and a watch on either. It is asked
when something changes hands, never on the path of rows; while it is away, everything that runs continues.

A compare-and-set compares the value itself. Values never return to an earlier one (a configuration contains its epoch,
a placement table its version), so that is as good as a revision, and users may learn a value from elsewhere. In etcd it
is a transaction with a comparison of `VALUE` (of `VERSION` with 0 for a missing key); members are keys with a lease.

Invariants of each implementation (`dataplane/testing/coordinators.py`):

- All calls but watches are linearizable: each takes effect at one moment between its beginning and its end.
- A call that raises Unavailable did not take effect and will not; one that raises OutcomeUnknown may have, or may yet.
  A read settles it, except for what is still in transit.
- A watch gives the current value, then later ones. It may skip values, never the last, and never gives an older one
  after a newer one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping

from dataplane.errors import OutcomeUnknown as OutcomeUnknown
from dataplane.errors import Retryable

DELETED = b""
"""The value of a key whose owner has deleted what it named, kept for a while: a key without any value may be one of
a coordinator that was wiped, for which the living nodes restore what they know."""


class Unavailable(Retryable):
    """The coordinator cannot be reached; nothing was changed."""


class Registration(ABC):
    """A member's entry, kept until it leaves or its lease expires."""

    @property
    @abstractmethod
    def member(self) -> str:
        """The member's name."""

    @abstractmethod
    async def renew(self) -> bool:
        """Keep the entry for `lease_s` from now. False if it is gone, and the member must register again. Raises
        Unavailable."""

    @abstractmethod
    async def leave(self) -> None:
        """Remove the entry; others see it at once. Raises Unavailable: then the lease must expire."""


class Coordinator(ABC):
    """One client's view. Called from one event loop; a cancelled call may have taken effect, or may yet."""

    @property
    @abstractmethod
    def address(self) -> str:
        """What it is and where, for people."""

    @abstractmethod
    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        """Become a member, with a value that others can read, for `lease_s` from now and from each renewal. It
        replaces an earlier registration of that name, whose lease then renews nothing. Raises Unavailable,
        OutcomeUnknown."""

    @abstractmethod
    async def members(self) -> Mapping[str, bytes]:
        """All members whose leases have not expired. Raises Unavailable."""

    @abstractmethod
    def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """The members now, then at each change. Raises Unavailable if the watch breaks; then begin another."""

    @abstractmethod
    async def evict(self, member: str, value: bytes) -> None:
        """Remove the member's entry if it has this value: who has seen its process end need not wait for the lease.
        Its registration then renews nothing. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    async def read(self, key: str) -> bytes | None:
        """The value of a key, None if it has none. Raises Unavailable."""

    @abstractmethod
    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        """If the key has the value `expected` (None: no value), set it to `value` (None: remove it). Returns its
        value afterwards: `value` if that happened, now or before. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        """The value now, then at each change. Raises Unavailable if the watch breaks; then begin another."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the watches, and leave nothing behind; registrations expire by themselves. Idempotent."""
