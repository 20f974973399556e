"""What is about to be handed over is freed when who hands it goes, and only then."""

from __future__ import annotations

from dataplane.node.requests.pending_shards import PendingShards


def test_what_was_not_handed_over_when_the_client_goes_is_freed_once() -> None:
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
