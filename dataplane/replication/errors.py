"""The refusal of a replica to answer a request: sent to the requester, never raised here."""

from __future__ import annotations

from dataplane.errors import Retryable


class NotLeader(Retryable):
    """This replica does not lead the partition, or leads it and may not answer yet. Nothing was changed.

    `leader`: the node that leads the partition in `epoch`, as known to this replica. It may be the node of this
    replica.
    """

    FIELDS = {"leader": "", "epoch": 0}
