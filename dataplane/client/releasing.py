"""Messages that release what the node granted this process. They wait for no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.stream import requests as r
from dataplane.wire import messages as m
from dataplane.wire.places import numbers

if TYPE_CHECKING:
    from dataplane.client.connection import Connection


def undo(to: Connection, reply: m.Reply) -> None:
    """Release the grant of a reply whose caller has stopped waiting."""
    match reply:
        case m.Reserved():
            to.tell(m.Abort([shard for shard, *_ in reply.extents]))
        case m.Held():
            held = [] if reply.carried else numbers(reply.places)
            to.tell(m.Unpin([*held, *(each[1] for each in reply.kept)]))
        case m.Kept():
            to.tell(m.Free(to.next_id(), reply.shards, [], ""))
        case m.StreamAnswer(result=r.Delivered() as given):
            nack = r.Nack(grant=given.grant, replica=given.replica, seen=False)
            to.tell(m.AskStream(to.next_id(), reply.stream, nack))
        case m.Admitted():
            to.tell(m.GiveBack(reply.stream, reply.ticket))
        case m.Stored():
            to.tell(m.Free(to.next_id(), [reply.shard], [], ""))
        case m.Retained():
            unlink(to, reply.node, reply.links)


def unlink(to: Connection, node: bytes, links: list[int]) -> None:
    """Free all that these links to shards of the node own."""
    if node == to.welcome.node:
        to.tell(m.Free(to.next_id(), links, [], ""))
    else:
        to.tell(m.FreeElsewhere(to.next_id(), node, [(link, [], (0, 0, b"")) for link in links]))


def discard(to: Connection, shards: list[int]) -> None:
    """Release reservations of this process, sealed or not. No other process may know these shards."""
    to.tell(m.Abort(shards))
    to.tell(m.Unpin(shards))
    to.tell(m.Free(to.next_id(), shards, [], ""))
