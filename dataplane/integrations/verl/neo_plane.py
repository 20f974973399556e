"""Implements `trainer.data_plane=dataplane` for verl's `neo` branch: NeoProto stores its batches in the plane.

verl imports this module in the trainer and in the workers of agent loops of a job with this setting. Other workers
attach to the plane when they receive their first batch. The trainer's process owns the values. If `$DATAPLANE_ADDRESS`
is set, that node is used. Otherwise the trainer starts a node on each host of the Ray job
(`dataplane.integrations.ray.up`), unless they run already.
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
