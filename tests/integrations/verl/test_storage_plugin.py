"""The plugin as verl finds it: by the package's entry point, loudly; and a node that the environment names."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

from tests.integrations.nursery import Nursery


def python(nursery: Nursery, code: str, *paths: Path, **environment: str) -> tuple[Any, str]:
    """What a program tells, in a process of its own with these directories on its path, and what it logs."""
    where = os.pathsep.join(map(str, paths))
    with nursery.process(textwrap.dedent(code), PYTHONPATH=where, **environment) as running:
        told = running.hear()
        running.wait()
        return told, running.logged()


NODE = """
import dataplane as dp
with dp.connect(config=dp.NodeConfig(memory="8MiB", spill=0, prewarm=0)) as plane:
    tell(plane.address)
    sys.stdin.readline()
"""


def test_verl_loads_the_plugin_which_replaces_init_alone(nursery: Nursery) -> None:
    code = """
        import logging
        logging.basicConfig(level=logging.INFO)
        from transfer_queue import init, kv_put
        import verl, transfer_queue
        from dataplane.integrations.verl import plugin
        tell([init.__module__, transfer_queue.init is transfer_queue.interface.init is not init,
              transfer_queue.kv_put is kv_put, plugin.loaded])
    """
    told, logged = python(nursery, code)
    assert told == ["transfer_queue.interface", True, True, True]
    assert "registered the TransferQueue backend Dataplane: transfer_queue.backend.storage_backend=Dataplane" in logged


def test_the_reason_for_a_missing_backend_is_logged(nursery: Nursery, tmp_path: Path) -> None:
    """Which verl itself would tell at DEBUG alone."""
    broken = tmp_path / "transfer_queue"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no such luck')")
    told, logged = python(nursery, "import verl; tell('on')", tmp_path)
    assert told == "on"
    assert "backend Dataplane is not there" in logged
    assert "no such luck" in logged


def test_verl_replaces_all_calls_if_the_environment_says_so(nursery: Nursery) -> None:
    code = "import verl, transfer_queue; tell(transfer_queue.kv_put.__module__)"
    told, logged = python(nursery, code, DATAPLANE_TRANSFER_QUEUE="nested")
    assert told == "dataplane.integrations.transfer_queue.kv"
    assert "dataplane replaces the module transfer_queue" in logged


def test_a_node_address_in_the_environment_is_used_instead_of_ray_nodes(nursery: Nursery) -> None:
    """Its section in the configuration may be missing; calls are replaced from `init()` to `close()`."""
    code = """
        from omegaconf import OmegaConf
        import transfer_queue as tq
        from dataplane.integrations.verl import plugin
        from transfer_queue import init, kv_list, close
        conf = OmegaConf.create({"backend": {"storage_backend": "Dataplane"}})
        OmegaConf.set_struct(conf, True)
        init(conf)
        found = [tq.kv_list(), tq.get_client().get_partition_list(), tq.kv_list.__module__]
        tq.close()
        tell([*found, tq.kv_list.__module__, "DATAPLANE_TRANSFER_QUEUE" in os.environ])
    """
    with nursery.process(NODE) as running:
        address = running.hear()
        told, logged = python(nursery, code, DATAPLANE_ADDRESS=address)
    module = "dataplane.integrations.transfer_queue.kv"
    assert told == [{}, [], module, "transfer_queue.interface", False]
    assert logged.count(f"TransferQueue stores in the plane (Dataplane): by the node at {address}") == 1
