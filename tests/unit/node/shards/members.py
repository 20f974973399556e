"""A membership of those that a test says."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from dataplane.cluster.membership import Member, Membership
from tests.coordinator import ProcessCoordinator

ME = b"myself.."


class Members(Membership):
    def __init__(self, *nodes: bytes, of: Mapping[bytes, Member] | None = None) -> None:
        super().__init__(ProcessCoordinator(), ME.hex(), Member(1, ""))
        self._seen.set()
        self._say({node: Member(1, "") for node in nodes} | dict(of or {}))

    def _say(self, members: Mapping[bytes, Member]) -> None:
        named = {node.hex(): msgspec.structs.replace(each, node=node.hex()) for node, each in members.items()}
        self.current = MappingProxyType(named)
        for changed in self._changed:
            changed()

    def lose(self, node: bytes) -> None:
        """This one is a member no more."""
        self._say({other: member for other, member in self.members.items() if other != node})
