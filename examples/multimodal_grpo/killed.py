"""`python -m examples.multimodal_grpo.killed`: the job, of which all processes are killed several times, at random.

The stream is durable and the trainer keeps its state, so the job goes on where it was. In the end each row that was
ever appended was counted once. The last life alone ends at its target: a fast machine may reach it before.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

LEAST_S, MOST_S = 5.0, 25.0  # that a life lasts
NEVER = ["--target", "2"]  # a mean reward is at most 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the last life: 0 where the count is exact and the target reached; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m examples.multimodal_grpo.killed", description=__doc__.partition(": ")[2]
    )
    parser.add_argument("--kills", type=int, default=3, help="how often everything is killed (%(default)s)")
    parser.add_argument("--within", type=float, nargs=2, default=(LEAST_S, MOST_S), metavar="SECONDS", help="of a life")
    parser.add_argument("--dir", type=Path, help="where it is kept (default: a directory that is removed)")
    options, job = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as made:
        directory = options.dir or Path(made)
        process = None
        try:
            for life in range(options.kills):
                began = time.monotonic()
                process = _start(directory, life, [*job, *NEVER])
                try:
                    code = process.wait(random.uniform(*options.within))
                except subprocess.TimeoutExpired:
                    killed = kill_all(process.pid)
                    process.wait()
                    said = f"life {life}: all {killed} processes were killed after {time.monotonic() - began:.1f} s"
                    print(said, flush=True)
                else:
                    print(f"life {life} ended by itself, before it was killed")
                    return code
            process = _start(directory, options.kills, job)
            return process.wait()
        except KeyboardInterrupt:
            if process is not None:
                process.wait()  # it was interrupted too, and uses the directory until it has ended
            return 130


def _start(directory: Path, life: int, job: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "examples.multimodal_grpo", "--data-dir", str(directory), "--life", str(life)]
    return subprocess.Popen([*command, "--no-plot", *job])


def kill_all(root: int) -> int:
    """Kill (SIGKILL) a process and all that it has started, none of which can act in between; how many these were."""
    stopped: list[int] = []
    while fresh := [pid for pid in (root, *descendants(root)) if pid not in stopped]:
        for pid in fresh:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    return len(stopped)


def descendants(pid: int) -> list[int]:
    """All that a process has started, and what they have."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, last = [], [pid]
    while last:
        last = [child for parent in last for child in children.get(parent, ())]
        found += last
    return found


if __name__ == "__main__":
    sys.exit(main())
