"""The refusal of a replica to answer a request: sent to the requester, never raised here."""

from __future__ import annotations

from dataplane.errors import Retryable


class NotLeader(Retryable):
    """This replica does not answer for the partition, or not yet; nothing was changed.

    `leader` is the node that leads the partition in `epoch`, as known here. It may be this one, which has to wait.
    """

    FIELDS = {"leader": "", "epoch": 0}
