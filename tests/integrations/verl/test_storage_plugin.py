"""The backend as verl finds it: by the package's entry point, loudly; and its settings."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

import dataplane as dp
from dataplane.integrations.verl.settings import StorageSettings
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


def test_verl_loads_the_storage_backend_and_logs_it(nursery: Nursery) -> None:
    code = """
        import logging
        logging.basicConfig(level=logging.INFO)
        import verl
        from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
        from transfer_queue.storage.managers.base import StorageManagerFactory
        manager = StorageManagerFactory._registry["Dataplane"]
        tell([manager.__module__, StorageBootstrapProvider.get_provider("Dataplane").__module__])
    """
    told, logged = python(nursery, code)
    where = "dataplane.integrations.verl"
    assert told == [f"{where}.storage", f"{where}.plugin"]
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


def test_the_backend_is_not_registered_when_dataplane_replaces_transfer_queue(nursery: Nursery) -> None:
    code = """
        import logging
        logging.basicConfig(level=logging.INFO)
        import verl, transfer_queue
        tell(transfer_queue.kv_put.__module__)
    """
    told, logged = python(nursery, code, DATAPLANE_TRANSFER_QUEUE="nested")
    assert told == "dataplane.integrations.transfer_queue.kv"
    assert "backend Dataplane is not registered: dataplane replaces" in logged
    assert "is not there" not in logged


def test_a_node_address_in_the_environment_is_used_instead_of_ray_nodes(nursery: Nursery) -> None:
    """Where $DATAPLANE_ADDRESS says of one, the backend starts none; its node in the configuration may be missing."""
    code = """
        from omegaconf import OmegaConf
        from dataplane.integrations.verl import plugin
        conf = OmegaConf.create({"backend": {"storage_backend": "Dataplane"}})
        OmegaConf.set_struct(conf, True)
        tell([plugin.start(conf), dict(conf.backend.Dataplane)])
    """
    with nursery.process(NODE) as running:
        address = running.hear()
        told, _ = python(nursery, code, DATAPLANE_ADDRESS=address)
    assert told == [{"address": address}, {}]


def test_storage_settings_are_parsed() -> None:
    given = {"memory": "1GiB", "spill": 0, "transports": "nixl,tcp", "timeout": 5, "dense": True, "prewarm": None}
    settings = StorageSettings.of(given)
    assert settings.transports == ("nixl", "tcp")
    assert (settings.timeout, settings.dense, settings.key) == (5.0, True, None)
    config = settings.config()
    assert config is not None
    assert (config.memory_bytes, config.spill_bytes) == (1 << 30, 0)
    assert StorageSettings.of(None).config() is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"memroy": "1GiB"}, "no setting memroy: there are memory, spill"),
        ({"memory": "much"}, "memory is bytes, or a number"),
        ({"memory": [1]}, "memory is bytes as an integer or text"),
        ({"transports": ["smoke"]}, "transports are some of tcp, ucx, nixl"),
        ({"timeout": "long"}, "timeout is a number of seconds"),
        ({"timeout": float("nan")}, "timeout is a number of seconds"),
        ({"dense": "yes"}, "dense is true or false"),
        ({"fallback": 1}, "fallback is true or false"),
        ({"key": "/nowhere/key"}, "dataplane keygen"),
    ],
    ids=str,
)
def test_invalid_storage_settings_are_refused(given: dict[str, object], why: str) -> None:
    with pytest.raises(dp.Misuse, match=why):
        StorageSettings.of(given).config()
