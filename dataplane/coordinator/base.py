"""The interface of a cluster's coordinator, implemented on etcd and, for a node alone, in the process.

It has three functions: members with leases, values that change by compare-and-set, and watches of both. It is needed
when a lead or a membership changes, never on the path of rows; while it is away, everything that runs continues.

A compare-and-set compares the value itself. Values never return to an earlier one (a configuration contains its epoch,
a placement table its version), so that is as good as a revision, and nodes may learn a value from each other. In etcd
it is a transaction with a comparison of `VALUE` (of `VERSION` with 0 for a missing key); members are keys with a lease.

Invariants of each implementation (`tests/conformance/coordinators.py`):

- All calls but watches are linearizable: each takes effect at one moment between its beginning and its end.
- A call that raises Unavailable did not take effect and will not; one that raises OutcomeUnknown may have, or may yet.
  A read settles that, except for requests that are still in transit.
- A watch gives the current value, then later ones. It may skip values, but not the last, and never gives an older value
  after a newer one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping

from dataplane.errors import OutcomeUnknown as OutcomeUnknown
from dataplane.errors import Retryable

DELETED = b""
"""The value of a deleted key, kept for a while, for keys of which one without any value may be one of a coordinator
that was wiped, which the living nodes restore."""


class Unavailable(Retryable):
    """The coordinator cannot be reached; nothing was changed."""


class Registration(ABC):
    """A member's entry, kept until it leaves or its lease expires."""

    @abstractmethod
    async def renew(self) -> bool:
        """Keep the entry for `lease_s` from now. Returns False if it is gone; then the member must register again.
        Raises Unavailable."""

    @abstractmethod
    async def leave(self) -> None:
        """Remove the entry; others see that at once. Raises Unavailable; then the entry stays until its lease
        expires."""


class Coordinator(ABC):
    """One client of the coordinator. Called from one event loop. A cancelled call may have taken effect, or may yet."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Kind and address, for display."""

    @abstractmethod
    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        """Become a member, with a value that others can read, for `lease_s` from now and from each renewal. An earlier
        registration of that name is replaced and can no longer be renewed. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    async def members(self) -> Mapping[str, bytes]:
        """All members whose leases have not expired. Raises Unavailable."""

    @abstractmethod
    def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """The members now, then at each change. Raises Unavailable if the watch breaks; then begin another."""

    @abstractmethod
    async def evict(self, member: str, value: bytes) -> None:
        """Remove the member's entry if it has this value: a node that has seen its process end need not wait for the
        lease. Its registration can no longer be renewed. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    async def read(self, key: str) -> bytes | None:
        """The value of a key, None if it has none. Raises Unavailable."""

    @abstractmethod
    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        """If the key has the value `expected` (None: no value), set it to `value` (None: remove it). Returns the
        value afterwards: `value` if this call or an earlier one has set it. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        """The value now, then at each change. Raises Unavailable if the watch breaks; then begin another."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the watches and release all resources; registrations expire by themselves. Idempotent."""
