"""Why a replica did not answer a request. It is handed to who asked, never raised here."""

from __future__ import annotations

from dataplane.errors import Retryable


class NotLeader(Retryable):
    """This replica does not answer for the partition, or not now; nothing was changed.

    `leader` is the node that leads it as far as is known here, in `epoch`; it may be this one, which has to wait."""

    FIELDS = {"leader": "", "epoch": 0}
