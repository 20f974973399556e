"""Run a suite again and again, and name each test that failed in any run, how often, and how long it takes.

    python -P tests/stability.py --runs 20 [--load 4] [--condition NAME] ARGUMENT...

The arguments are pytest's, as in `tests.rerun`, and a run ends as there: what fails is run once more, alone. `--load`
starts that many processes beside the tests that do nothing but compute. `--condition` runs them where something is
different: see `CONDITIONS`; those that need it ask for root.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.rerun import Report, run, run_again  # noqa: E402

NO_IPV6 = "ip link set lo up; echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6"

CONDITIONS = {
    "background": "sh -c '{} & wait $!'",  # a shell without job control ignores SIGINT and SIGQUIT in the background
    "ignored": "env --ignore-signal=INT,QUIT,TERM,HUP,CHLD {}",
    "nohup": "nohup {}",
    "no-ipv6": f"unshare --net sh -c '{NO_IPV6}; exec {{}}'",
    "tmpdir": "sh -c 'mkdir -p /tmp/{dir}; TMPDIR=/tmp/{dir} {}; code=$?; rm -r /tmp/{dir}; exit $code'",
}


def command(condition: str, own: list[str]) -> list[str]:
    """The command by which this one runs under a condition."""
    line = CONDITIONS[condition].replace("{dir}", "d" * 85).replace("{}", shlex.join(own))
    return shlex.split(line)


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Have processes beside the tests that compute and do nothing else."""
    code = "import os\nstarter = os.getppid()\nwhile os.getppid() == starter: pass"  # this one may be killed
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def once(arguments: list[str]) -> tuple[Report, dict[str, str], bool]:
    """A run: its report, what failed in it, and whether it counts as passed."""
    first = run(arguments)
    if not first.by_chance:
        return first, first.failed, first.code == 0
    return first, first.failed, run_again(arguments, first).code == 0


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -P tests/stability.py")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--load", type=int, default=0)
    parser.add_argument("--condition", choices=CONDITIONS)
    chosen, rest = parser.parse_known_args(arguments)
    if chosen.condition:
        os.makedirs("/tmp/" + "d" * 85, exist_ok=True)
        own = [sys.executable, "-P", __file__, f"--runs={chosen.runs}", f"--load={chosen.load}", *rest]
        return subprocess.run(command(chosen.condition, own), check=False).returncode
    passed, took_s = 0, []
    times: Counter[str] = Counter()
    seconds: dict[str, list[float]] = defaultdict(list)
    reasons: dict[str, str] = {}
    with load(chosen.load):
        for number in range(1, chosen.runs + 1):
            began = time.monotonic()
            report, failed, ended_well = once(rest)
            took_s.append(time.monotonic() - began)
            passed += ended_well
            times.update(failed.keys())
            reasons.update(failed)
            for test, test_s in report.seconds.items():
                seconds[test].append(test_s)
            print(
                f"run {number} of {chosen.runs}: {'passed' if ended_well else 'FAILED'}, {took_s[-1]:.0f} s, "
                f"{len(report.seconds)} tests, {len(failed)} failed at first",
                flush=True,
            )
    print(f"\n{passed} of {chosen.runs} runs passed; {min(took_s):.0f} to {max(took_s):.0f} s a run")
    for test, count in times.most_common():
        print(f"failed {count} of {chosen.runs} times, {max(seconds[test]):.1f} s: {test} ({reasons[test]})")
    return int(passed < chosen.runs)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
