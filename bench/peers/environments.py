"""Creates an environment for each system once, by venv and pip, under the user's cache. Nothing is installed elsewhere.

Debian libraries that a wheel needs are downloaded by apt-get and unpacked into the environment. `Missing` is raised
with the reason if something cannot be installed. A complete environment has a file that lists its packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.systems import System

NEEDED = ("numpy", "xxhash", "psutil")
INSTALL_S = 900.0
ROOT = Path(__file__).resolve().parents[2]


class Missing(Exception):
    """An environment could not be created; the text has the reason."""


@dataclass(frozen=True)
class Environment:
    """Interpreter and variables of a system's processes."""

    python: Path
    env: dict[str, str] = field(default_factory=dict)


def cache() -> Path:
    """The directory of all environments."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollout-dataplane" / "peers"


def _made_of(system: System) -> str:
    return "\n".join((*NEEDED, *system.packages, *system.libraries)) + "\n"


def made(system: System) -> bool:
    """Whether a system's environment exists and is complete."""
    stamp = cache() / system.name / "made-of"
    return stamp.exists() and stamp.read_text() == _made_of(system)


def environment(system: System, given: Path | None = None, limit_s: float = INSTALL_S) -> Environment:
    """The environment of a system: with the `given` interpreter, the benchmark's own if it needs no packages, or a
    created one. Raises `Missing` if none can be created in time."""
    path = dict(system.env) | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    if given is not None or not system.packages:
        return Environment(given or Path(sys.executable), path)
    where = cache() / system.name
    if not made(system):
        _make(system, where, limit_s)
        (where / "made-of").write_text(_made_of(system))
    if system.libraries:
        found = sorted({str(lib.parent) for lib in (where / "debian").rglob("*.so*")})
        path["LD_LIBRARY_PATH"] = os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return Environment(where / "bin" / "python", path)


def _make(system: System, where: Path, limit_s: float) -> None:
    print(f"making an environment for {system.title} in {where}", flush=True)
    ends = time.monotonic() + limit_s
    if not (where / "bin" / "python").exists():
        _run([sys.executable, "-m", "venv", str(where)], ends)
    pip = [str(where / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, *NEEDED, *system.packages], ends)
    if system.libraries:
        _unpack(system.libraries, where / "debian", ends)


def _unpack(packages: Sequence[str], where: Path, ends: float) -> None:
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise Missing(f"needs {', '.join(packages)} of Debian, and there is no apt-get here")
    where.mkdir(exist_ok=True)
    _run(["apt-get", "download", *packages], ends, cwd=where)
    for archive in sorted(where.glob("*.deb")):
        _run(["dpkg", "-x", str(archive), str(where)], ends)


def _run(command: list[str], ends: float, cwd: Path | None = None) -> None:
    left = ends - time.monotonic()
    shown = " ".join([Path(command[0]).name, *command[1:]])
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=max(1, left), check=False)
    except subprocess.TimeoutExpired:
        raise Missing(f"not within its time: {shown}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise Missing(f"{shown} failed: {lines[-1][:300]}")
