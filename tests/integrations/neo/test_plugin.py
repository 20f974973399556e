"""The plugin, in verl's `neo` branch as verl loads it, and in a verl whose data planes are others."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import verl

from dataplane.integrations.verl import plugin

PROGRAM = """
    import sys
    from importlib import metadata
    found = metadata.EntryPoint("dataplane", "dataplane.integrations.verl.plugin:loaded", "verl.plugins")
    others = metadata.entry_points
    metadata.entry_points = lambda **how: [found] if how == {"group": "verl.plugins"} else others(**how)
    import verl
    from verl.trainer.ppo import data_plane
    assert "verl.experimental.neoproto" not in sys.modules, "it is imported where a job asks for it"
    print(data_plane._DATA_PLANE_CLASSES["dataplane"])
"""


@pytest.mark.timeout(120)
def test_verl_loads_the_plugin_and_resolves_its_data_plane() -> None:
    environment = {**os.environ, "VERL_USE_EXTERNAL_PLUGINS": "auto"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["dataplane.integrations.verl.neo_plane.DataplanePPODataPlane"]


def test_a_verl_without_data_planes_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verl, "__path__", [str(tmp_path)])
    assert not plugin.register_neo()


def test_an_incompatible_data_plane_registry_of_verl_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from verl.trainer.ppo import data_plane

    monkeypatch.delattr(data_plane, "_DATA_PLANE_CLASSES")
    assert not plugin.register_neo()
    assert "trainer.data_plane=dataplane" in caplog.text
