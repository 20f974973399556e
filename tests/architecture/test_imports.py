"""What a module may import is in pyproject.toml (`tool.importlinter`). Here: what is loaded with which module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted((ROOT / "dataplane").rglob("*.py"))

#: Optional, heavy, or both: imported where they are used.
LAZY = {
    *("torch", "tensordict", "ray", "ucxx", "nixl", "nixl_cu12", "nixl_cu13", "aiohttp", "cryptography", "uvloop"),
    *("prometheus_client", "opentelemetry", "matplotlib", "transformers", "pandas", "sklearn", "pytest"),
}

#: Imported where they are used: they derive from classes of these packages, or only verl and TransferQueue import them.
WITH_THEM = {
    "dataplane.integrations.transfer_queue.streaming",
    "dataplane.integrations.drafting.huggingface",
    "dataplane.integrations.ray_tensors",
    "dataplane.testing.samplers",
    *(f"dataplane.integrations.verl.{name}" for name in ("dispatch", "proto", "columns")),
    *(f"dataplane.integrations.verl.{name}" for name in ("neo", "neo_plane", "checkpointing")),
}

NODE = ("store", "wire", "node", "stream", "replication", "coordinator")
"""The packages of a node, which loads no Arrow: it moves bytes and never looks into them."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def loaded_with(names: list[str]) -> set[str]:
    """The top-level packages that a new interpreter has loaded after importing these modules."""
    report = "import sys\nprint(*sorted({name.partition('.')[0] for name in sys.modules}))"
    statement = "".join(f"import {name}\n" for name in names if not name.endswith("__main__"))  # those run
    command = [sys.executable, "-W", "error", "-c", statement + report]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_optional_packages_are_imported_only_at_their_point_of_use() -> None:
    assert len(MODULES) > 200
    assert not loaded_with([name for path in MODULES if (name := module_name(path)) not in WITH_THEM]) & LAZY


def test_loading_node_modules_does_not_load_arrow() -> None:
    loaded = loaded_with([module_name(path) for path in MODULES if path.relative_to(ROOT).parts[1] in NODE])
    assert "dataplane" in loaded
    assert not loaded & {"pyarrow", *LAZY}
