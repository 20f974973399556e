"""`trainer.data_plane=dataplane` of verl's `neo` branch: its NeoProto with the plane as its storage.

verl imports this module in the trainer and in the workers of agent loops of a job with this setting. Other workers
use the plane from the first batch that they get. The trainer's process owns the values. The nodes are those of the
Ray job (`dataplane.integrations.ray.up`, which the trainer calls unless it was called before) or the one that
`$DATAPLANE_ADDRESS` names.
"""

from __future__ import annotations

import logging

from verl.experimental.neoproto.data_plane import NeoPPODataPlane
from verl.experimental.neoproto.storage.default import set_default_storage_engine

from dataplane.config import environment
from dataplane.integrations import process
from dataplane.integrations.verl import neo

log = logging.getLogger(__name__)


class DataplanePPODataPlane(NeoPPODataPlane):  # type: ignore[misc]  # verl has no types
    """verl's strategy for NeoProto, with values in the plane."""

    name = "dataplane"

    def setup(self) -> None:
        """Start a node on each host, and make this process the owner of the values.

        Raises Misuse if Ray is not initialised and no node is known, Rejected, PeerUnavailable.
        """
        super().setup()
        if environment().address is None and process.ray_job() is not None:
            from dataplane.integrations import ray as nodes

            nodes.up()
        process.plane()
        set_default_storage_engine(neo.DataplaneStorageEngine())
        log.info("NeoProto stores its batches in the plane: trainer.data_plane=%s", self.name)


neo.attach()
