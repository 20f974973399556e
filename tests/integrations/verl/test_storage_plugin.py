"""The backend as verl finds it: by the package's entry point, loudly; and its settings."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import dataplane as dp
from dataplane.integrations.verl.settings import Settings

ROOT = Path(__file__).parents[3]


def python(program: str, *paths: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, with these directories on its path."""
    command = [sys.executable, "-c", textwrap.dedent(program)]
    known = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    known["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, env=known | environment, cwd=paths[0]
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the package's metadata, as an installation has it, and the package."""
    target = tmp_path_factory.mktemp("installed")
    found = subprocess.run(
        [
            *(sys.executable, "-c"),
            "import setuptools.build_meta as b, sys; print(b.prepare_metadata_for_build_wheel(sys.argv[1]))",
            str(target),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=_sources(tmp_path_factory.mktemp("sources")),
    )
    assert found.returncode == 0, found.stderr
    (target / "dataplane").symlink_to(ROOT / "dataplane")
    return target


def _sources(place: Path) -> Path:
    """The package's sources, where a build may write."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "dataplane"):
        (place / name).symlink_to(ROOT / name)
    return place


@pytest.mark.timeout(180)
def test_verl_loads_it_and_it_says_so(installed: Path) -> None:
    pytest.importorskip("verl", reason="needs verl: make test-integrations")
    program = """
        import logging
        logging.basicConfig(level=logging.INFO)
        import verl
        from transfer_queue.storage.bootstrap.provider import StorageBootstrapProvider
        from transfer_queue.storage.managers.base import StorageManagerFactory
        print(StorageManagerFactory._registry["Dataplane"].__module__)
        print(StorageBootstrapProvider.get_provider("Dataplane").__module__)
    """
    done = python(program, installed)
    assert done.returncode == 0, done.stderr
    where = "dataplane.integrations.verl"
    assert done.stdout.split()[-2:] == [f"{where}.storage", f"{where}.plugin"]
    assert "backend Dataplane is there: transfer_queue.backend.storage_backend=Dataplane" in done.stderr


@pytest.mark.timeout(180)
def test_why_it_was_not_loaded_is_said(installed: Path, tmp_path: Path) -> None:
    """Which verl itself would tell at DEBUG alone."""
    pytest.importorskip("verl", reason="needs verl: make test-integrations")
    broken = tmp_path / "transfer_queue"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise ImportError('no such luck')")
    done = python("import verl; print('on')", tmp_path, installed)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "on"
    assert "backend Dataplane is not there" in done.stderr
    assert "no such luck" in done.stderr


@pytest.mark.timeout(120)
def test_a_node_of_ones_own_is_used_without_ray_s() -> None:
    """Where $DATAPLANE_ADDRESS says of one, the backend starts none; its node in the configuration may be missing."""
    pytest.importorskip("transfer_queue", reason="needs TransferQueue: make test-integrations")
    program = """
        from omegaconf import OmegaConf
        from dataplane.integrations.verl import plugin
        conf = OmegaConf.create({"backend": {"storage_backend": "Dataplane"}})
        OmegaConf.set_struct(conf, True)
        print(plugin.start(conf), dict(conf.backend.Dataplane))
    """
    done = python(program, ROOT, DATAPLANE_ADDRESS="unix:///nowhere.sock")
    assert done.stdout.strip() == "{'address': 'unix:///nowhere.sock'} {}", done.stderr


def test_settings() -> None:
    given = {"memory": "1GiB", "spill": 0, "transports": "nixl,tcp", "timeout": 5, "dense": True, "prewarm": None}
    settings = Settings.of(given)
    assert settings.transports == ("nixl", "tcp")
    assert (settings.timeout, settings.dense, settings.key) == (5.0, True, None)
    config = settings.config()
    assert config is not None
    assert (config.memory_bytes, config.spill_bytes) == (1 << 30, 0)
    assert Settings.of(None).config() is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"memroy": "1GiB"}, "no setting memroy: there are memory, spill"),
        ({"memory": "much"}, "'much' is not a size"),
        ({"memory": [1]}, "size"),
        ({"transports": ["smoke"]}, "transports are some of tcp, ucx, nixl"),
        ({"timeout": "long"}, "timeout is a number of seconds"),
        ({"timeout": float("nan")}, "timeout is a number of seconds"),
        ({"dense": "yes"}, "dense is true or false"),
        ({"key": "/nowhere/key"}, "dataplane keygen"),
    ],
    ids=str,
)
def test_a_setting_that_is_none_is_refused(given: dict[str, object], why: str) -> None:
    with pytest.raises(dp.Misuse, match=why):
        Settings.of(given).config()
