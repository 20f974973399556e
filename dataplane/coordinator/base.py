"""What a cluster asks of its coordinator, whatever that is: etcd, or this process.

Three things, and no more: members on leases, values that change by compare-and-set, and a watch on either. It is asked
when something changes hands, never on the path of rows; while it is away, what lives goes on.

A compare-and-set compares the value itself. Values here never come back (a configuration carries its epoch, a placement
table its version), so that is as good as a revision, and a value may come to its users by other ways than from here. In
etcd it is a transaction with a comparison of `VALUE` (of `VERSION` with 0 for a key that is not there); members are
keys on a lease.

What always holds, of each implementation (`dataplane/testing/coordinators.py`):

- All calls but watches are linearizable: each takes effect at one moment between its beginning and its end.
- A call that raises Unavailable did not take effect and will not; one that raises OutcomeUnknown may have, or may yet.
  A read settles it, but for what is still on its way.
- A watch gives the value as it is, then as it becomes. It may pass over values in between, never the last, and never
  gives an older one after a newer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping

from dataplane.errors import OutcomeUnknown as OutcomeUnknown
from dataplane.errors import Retryable

DELETED = b""
"""The value of a key whose owner has deleted what it named, and keeps for a while: a key without any value may be that
of a coordinator that was wiped, of which those that live restore what they know."""


class Unavailable(Retryable):
    """The coordinator can not be reached; nothing was changed."""


class Registration(ABC):
    """A member's place, kept until it is left or its lease runs out unrenewed."""

    @property
    @abstractmethod
    def member(self) -> str:
        """The member's name."""

    @abstractmethod
    async def renew(self) -> bool:
        """Keep the place for `lease_s` from now; False if it has gone, and the member has to register again. Raises
        Unavailable."""

    @abstractmethod
    async def leave(self) -> None:
        """Give the place up; others see it at once. Raises Unavailable: then the lease has to run out."""


class Coordinator(ABC):
    """One client's view. Called from one loop; a cancelled call may have taken effect, or may yet."""

    @property
    @abstractmethod
    def address(self) -> str:
        """What it is and where, for people."""

    @abstractmethod
    async def register(self, member: str, value: bytes, lease_s: float) -> Registration:
        """Be a member, with a value for others to read, for `lease_s` from now and from each renewal; in place of an
        earlier registration of that name, whose lease then renews nothing. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    async def members(self) -> Mapping[str, bytes]:
        """All whose leases have not run out. Raises Unavailable."""

    @abstractmethod
    def watch_members(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        """The members now, then at each change. Raises Unavailable where the watch breaks; begin another then."""

    @abstractmethod
    async def evict(self, member: str, value: bytes) -> None:
        """Take the member's place away if it has this value: who has seen its process end need not wait for the lease.
        Its registration then renews nothing. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    async def read(self, key: str) -> bytes | None:
        """The value of a key, None if it has none. Raises Unavailable."""

    @abstractmethod
    async def swap(self, key: str, expected: bytes | None, value: bytes | None) -> bytes | None:
        """If the key has the value `expected` (None: no value), give it `value` (None: take it away). The value that it
        has afterwards: `value` if that happened, or happened before. Raises Unavailable, OutcomeUnknown."""

    @abstractmethod
    def watch(self, key: str) -> AsyncGenerator[bytes | None, None]:
        """The value now, then as it changes. Raises Unavailable where the watch breaks; begin another then."""

    @abstractmethod
    async def aclose(self) -> None:
        """End the watches, and leave nothing behind; registrations run out by themselves. Idempotent."""
