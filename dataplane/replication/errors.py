"""Why a request to a partition was not answered. They are handed to who asked, never raised here."""

from __future__ import annotations

from dataplane.errors import DataplaneError, Retryable


class NotLeader(Retryable):
    """This replica does not answer for the partition, or not now; nothing was changed.

    `leader` is the node that leads it as far as is known here, in `epoch`; it may be this one, which has to wait."""

    FIELDS = {"leader": "", "epoch": 0}


class OutcomeUnknown(DataplaneError):
    """The command may be committed or not. The same command under the same sequence settles it, and is done once."""

    FIELDS = {"epoch": 0}
