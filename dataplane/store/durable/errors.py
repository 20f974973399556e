"""The error of a data directory that this node cannot use."""

from __future__ import annotations

from dataplane.errors import Rejected


class DirectoryUnusable(Rejected):
    """Nothing in the directory was changed. `reason`: "in use", "another node's", "another cluster's", "another
    program's", "another version's", "another user's", "read-only", "no permission", "file system", "failed" or
    "closed"; the message says what to do."""

    FIELDS = {"path": "", "reason": ""}
