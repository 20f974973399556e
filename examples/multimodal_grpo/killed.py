"""`python -m examples.multimodal_grpo.killed`: run the job, and kill all of its processes at random times.

The stream is durable and the trainer saves its state, so each start continues the job. At the end, each row that was
ever appended was counted once. Only the last start, which is not killed, stops at the target reward.
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

LEAST_S, MOST_S = 5.0, 25.0  # from a start to the kill
NEVER = ["--target", "2"]  # a mean reward is at most 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code of the last start: 0 if the count is exact and the target is reached; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        "python -m examples.multimodal_grpo.killed", description=__doc__.partition(": ")[2]
    )
    parser.add_argument("--kills", type=int, default=3, help="how often all processes are killed (%(default)s)")
    parser.add_argument(
        "--within",
        type=float,
        nargs=2,
        default=(LEAST_S, MOST_S),
        metavar="SECONDS",
        help="least and most from start to kill",
    )
    parser.add_argument("--dir", type=Path, help="directory of stream and trainer (default: a temporary one)")
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
                    said = f"start {life}: all {killed} processes were killed after {time.monotonic() - began:.1f} s"
                    print(said, flush=True)
                else:
                    print(f"start {life} ended before it was killed")
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
    """Kill (SIGKILL) a process and all of its descendants. All are stopped first, so that none can react to the death
    of another. Returns their number."""
    stopped: list[int] = []
    while fresh := [pid for pid in (root, *descendants(root)) if pid not in stopped]:
        for pid in fresh:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
    for pid in stopped:
        os.kill(pid, signal.SIGKILL)
    return len(stopped)


def descendants(pid: int) -> list[int]:
    """The process ids of the children of a process, of their children, and so on."""
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
