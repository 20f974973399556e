"""What is about to be handed over is freed when who hands it goes, and only then."""

from __future__ import annotations

from dataplane.node.requests.row_requests import PendingShards


def test_pending_shards_are_freed_once_when_their_client_leaves() -> None:
    freed: list[int] = []
    handing = PendingShards(freed.extend)
    handing.begin(1, [5, 6])
    handing.begin(2, [7])
    handing.begin(3, [])
    handing.begin(4, [8])
    handing.end(2)
    handing.end(9)
    assert len(handing) == 3
    handing.leave()
    assert freed == [5, 6, 8]
    handing.leave()
    assert (freed, len(handing)) == ([5, 6, 8], 0)
