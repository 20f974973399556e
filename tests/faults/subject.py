"""A node in a process of its own whose calls into the operating system fail by a rule."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.faults.shim import Rule

MEMORY, SPILL = 4 << 20, 64 << 20
STOP_S = 60.0


class Subject:
    """`dataplane node` under the shim. Ends with the `with` block."""

    def __init__(
        self, directory: Path, shim: Path, *more: str, memory: int = MEMORY, armed: tuple[str, int, str] | None = None
    ) -> None:
        """`armed`: fail the first such call from the beginning: call, errno, target."""
        directory.mkdir(parents=True, exist_ok=True)
        self.spill = directory / "spill"
        self.runtime = Path(tempfile.mkdtemp(prefix="faults-"))  # short: a socket's path has 107 bytes at most
        self.log = directory / "log"
        self.rule = Rule(directory / "rule")
        if armed is not None:
            call, error, target = armed
            self.rule.arm(call, error, target=target)
        environment = os.environ | {
            "LD_PRELOAD": str(shim),
            "FAULTS_RULE": str(self.rule.path),
            "XDG_RUNTIME_DIR": str(self.runtime),
            "OPENBLAS_NUM_THREADS": "1",  # the threads that are failed are the node's own
        }
        environment.pop("DATAPLANE_ADDRESS", None)
        command = [sys.executable, "-m", "dataplane.cli", "node", "--memory", str(memory), "--spill", str(SPILL)]
        command += ["--spill-dir", str(self.spill), "--prewarm", "0", *more]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip().partition("=")[2]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def logged(self) -> str:
        return self.log.read_text(errors="replace")

    def files(self) -> list[str]:
        return sorted(path.name for path in self.spill.rglob("*.spill"))

    def held(self) -> dict[str, int]:
        """How many descriptors, threads and mappings of shared memory it has."""
        maps = Path(f"/proc/{self.pid}/maps").read_text()
        return {
            "descriptors": len(os.listdir(f"/proc/{self.pid}/fd")),
            "threads": len(os.listdir(f"/proc/{self.pid}/task")),
            "mappings": maps.count("memfd:dataplane"),
        }

    def descriptors(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for number in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                found[os.readlink(f"/proc/{self.pid}/fd/{number}")] += 1
            except OSError:
                continue
        return found

    def stop(self) -> int | None:
        """Tell it to end; its exit code, or None where it does not end in time."""
        if self.alive:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return None

    def wait(self) -> int:
        return self._process.wait(STOP_S)

    def __enter__(self) -> Subject:
        return self

    def __exit__(self, *_: object) -> None:
        self.rule.disarm()
        if self.alive:
            self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self.rule.close()
        shutil.rmtree(self.runtime, ignore_errors=True)
