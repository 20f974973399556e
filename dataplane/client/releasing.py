"""Messages that release what the node granted this process. They wait for no answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dataplane.stream import requests as r
from dataplane.wire import messages as m
from dataplane.wire import row_messages as rm
from dataplane.wire import shard_messages as sm
from dataplane.wire.places import numbers

if TYPE_CHECKING:
    from dataplane.client.connection import Connection


def undo(to: Connection, reply: m.Reply) -> None:
    """Release the grant of a reply whose caller has stopped waiting; keep a report of lost rows for the next caller."""
    match reply:
        case sm.Reserved():
            to.tell(sm.Abort([shard for shard, *_ in reply.extents]))
        case sm.Held():
            held = [] if reply.carried else numbers(reply.places)
            to.tell(sm.UnpinShards([*held, *(each[1] for each in reply.kept)]))
        case sm.Kept():
            to.tell(sm.Free(to.next_id(), reply.shards))
        case rm.StreamAnswer(result=r.Delivered() as given):
            nack = r.Nack(grant=given.grant, replica=given.replica, seen=False)
            to.tell(rm.AskStream(to.next_id(), reply.stream, nack))
        case rm.StreamAnswer(result=r.SnapshotTaken() as taken):
            to.tell(rm.AskStream(to.next_id(), reply.stream, r.ReleaseSnapshot(snapshot=taken.snapshot)))
        case rm.LostRowsTaken():
            to.lost_rows.append(reply)
        case rm.RowsAdmitted():
            to.tell(rm.ReturnPermit(reply.stream, reply.ticket))
        case sm.ShardStored():
            to.tell(sm.Free(to.next_id(), [reply.shard]))
        case sm.Retained():
            unlink(to, reply.node, reply.links)


def unlink(to: Connection, node: bytes, links: list[int]) -> None:
    """Free all that these links to shards of the node own."""
    if node == to.welcome.node:
        to.tell(sm.Free(to.next_id(), links))
    else:
        to.tell(sm.Free(to.next_id(), parts=[(link, [], (0, 0, b"")) for link in links], node=node))


def discard(to: Connection, shards: list[int]) -> None:
    """Release reservations of this process, sealed or not. No other process may know these shards."""
    to.tell(sm.Abort(shards))
    to.tell(sm.UnpinShards(shards))
    to.tell(sm.Free(to.next_id(), shards))
