"""The cost of observation: statistics, rings and histograms that are always on, and a scrape of many streams.

`overhead` compares two nodes in one run. One of them is started with `DATAPLANE_OBSERVE=0`: it and its clients record
no events. A pair is a ratio of the least times of short blocks of calls, which alternate. Even on a busy machine, some
blocks of milliseconds are not interrupted. `replay` and `demo` compare whole jobs, alternately. The promise is about
the median of the pairs.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

import dataplane as dp
from bench import always_on
from bench.measure import Row, row, table, write_json
from dataplane.observe.ring import CODE, RingWriter

OVERHEAD = 1.0173  # of ScalAna, arXiv 2009.01692, table 2: 1.73 % on average
PAIRS = 9
JOBS = 9  # pairs of whole jobs, at most
JOBS_S = 420.0  # limit of all pairs of a job
JOB_S = 200.0  # limit of one run of a job
BLOCKS = 20
SCRAPES = 10


@contextmanager
def node(scratch: Path, *arguments: str, observe: bool = True) -> Iterator[str]:
    """Run a node in a process. Yields its address."""
    command = [sys.executable, "-m", "dataplane.cli", "node", "--memory", "256MiB", "--spill", "0", *arguments]
    environment = os.environ | {"DATAPLANE_OBSERVE": "1" if observe else "0", "XDG_RUNTIME_DIR": str(scratch)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().decode().strip().removeprefix("DATAPLANE_ADDRESS=")
        finally:
            process.terminate()


def overhead(scratch: Path) -> list[Row]:
    """Puts and gets of 1 KiB, and rows appended, consumed and acked: the time with observation over that without."""
    values = np.zeros((1, 256), np.float32)
    with ExitStack() as stack:
        planes = {
            on: stack.enter_context(dp.connect(stack.enter_context(node(scratch, observe=on)))) for on in (True, False)
        }
        streams = {on: plane.stream("rows", tasks=["actor"]) for on, plane in planes.items()}
        refs = {on: plane.put({"x": values}) for on, plane in planes.items()}

        def put(on: bool) -> None:
            planes[on].put({"x": values}, scope="block")

        def get(on: bool) -> None:
            planes[on].get(refs[on])

        def step(on: bool) -> None:
            stream = streams[on]
            for _ in range(8):
                stream.append({"x": values}, group="g")
            with stream.consume("actor", rows=8, min_rows=8, columns=["x"]) as delivery:
                delivery.get()

        found = []
        for name, work, calls in (("1 KiB puts", put, 25), ("1 KiB gets", get, 25), ("steps of 8 rows", step, 3)):
            for on in (True, False):
                _least(work, on, calls)
            ratios, best = [], []
            for _ in range(PAIRS):
                least = {True: 1e9, False: 1e9}
                for block in range(2 * BLOCKS):
                    on = bool(block % 2)
                    least[on] = min(least[on], _least(work, on, calls))
                ratios.append(least[True] / least[False])
                best.append(least[False])
                for plane in planes.values():
                    plane.free(scope="block")
            micros = 1e6 * statistics.median(best)
            detail = f"{PAIRS} pairs, each the least of {BLOCKS} blocks; {micros:.0f} us; load {os.getloadavg()[0]:.1f}"
            found.append(row(f"time with it / without, {name}", ratios, at_most=OVERHEAD, unit="x", detail=detail))
        return found


def _least(work: Callable[[bool], object], on: bool, calls: int) -> float:
    """Mean seconds of a call, of so many."""
    began = time.perf_counter()
    for _ in range(calls):
        work(on)
    return (time.perf_counter() - began) / calls


def recording(scratch: Path) -> list[Row]:
    """One plus the time of recording an event over that of a call, each the least of many, in one process."""
    recorder, clock = RingWriter(), time.monotonic_ns
    values = np.zeros((1, 256), np.float32)

    def record(_: bool) -> None:
        began = clock()
        recorder.record(CODE["put"], began)

    with node(scratch, observe=False) as address, dp.connect(address) as plane:
        ref = plane.put({"x": values})
        found = []
        calls: dict[str, Callable[[bool], object]] = {
            "put": lambda _: plane.put({"x": values}, scope="block"),
            "get": lambda _: plane.get(ref),
        }
        for name, call in calls.items():
            shares = []
            for _ in range(PAIRS):
                cost = min(_least(record, True, 2000) for _ in range(5))
                took = min(_least(call, False, 1) for _ in range(1000))
                shares.append(1 + cost / took)
            plane.free(scope="block")
            detail = f"{1e6 * cost:.2f} us of {1e6 * took:.0f}; load {os.getloadavg()[0]:.1f}"
            found.append(row(f"recording a 1 KiB {name}", shares, at_most=OVERHEAD, unit="x", detail=detail))
        return found


def _jobs(name: str, command: Sequence[str], scratch: Path, most_s: float) -> list[Row]:
    """The time and processor time of whole jobs, also of those that exit with 1. Pairs are made for `most_s` seconds,
    and at least one. Raises TimeoutError if a job takes longer than `JOB_S`."""

    def run(on: bool) -> tuple[float, float]:
        environment = os.environ | {"DATAPLANE_OBSERVE": "1" if on else "0", "XDG_RUNTIME_DIR": str(scratch)}
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        log = scratch / "job.log"
        with log.open("wb") as out:
            job = subprocess.Popen(
                [sys.executable, *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = job.wait(JOB_S)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
                raise TimeoutError(f"{name} did not end in {JOB_S:.0f} s: {log.read_text()[-200:]}") from None
        assert code in (0, 1), log.read_text()[-2000:]
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - began, processor_s

    run(True)
    pairs, began = [], time.monotonic()
    while len(pairs) < JOBS and (not pairs or (time.monotonic() - began) * (1 + 1 / len(pairs)) < most_s):
        first = len(pairs) % 2 == 0
        took = {on: run(on) for on in (first, not first)}
        pairs.append((took[True][0] / took[False][0], took[True][1] / took[False][1]))
    detail = f"{len(pairs)} pairs; load {os.getloadavg()[0]:.1f}"
    names = ("time", "processor time")
    return [
        row(
            f"{what} with it / without, {name}", [pair[at] for pair in pairs], at_most=OVERHEAD, unit="x", detail=detail
        )
        for at, what in enumerate(names)
    ]


def replay(scratch: Path, most_s: float) -> list[Row]:
    """A small replay (`bench.replay`)."""
    sizes = ["--prompts", "8", "--samples", "4", "--steps", "2", "--mode", "sync", "--runs", "1", "--speed", "8"]
    return _jobs("a replay", ["-m", "bench.replay", *sizes, "--json", str(scratch / "replay.json")], scratch, most_s)


def demo(scratch: Path, most_s: float) -> list[Row]:
    """A few steps of the demo (`examples.multimodal_grpo`)."""
    command = ["-m", "examples.multimodal_grpo", "--steps", "4", "--seconds", "190", "--target", "0", "--no-plot"]
    return _jobs("the demo", command, scratch, most_s)


def processor(scratch: Path) -> list[Row]:
    """Processor time of a client's observation."""
    with node(scratch) as address:
        return [*always_on.calls(address), *always_on.background(address)]


def scrape(scratch: Path) -> list[Row]:
    """`/metrics` of a node with 1,000 streams of three tasks."""
    with node(scratch, "--metrics", "127.0.0.1:0") as address, dp.connect(address) as plane:
        host = plane.stats().metrics
        for number in range(1000):
            stream = plane.stream(f"rollouts-{number:04}", tasks=["reward", "reference", "actor"])
            for _ in range(1 + number % 4):
                stream.append({"x": [1, 2]})
        pid, runs, computed, size = plane.stats().pid, [], [], 0
        for _ in range(5):
            before = _processor_ms(pid)
            for _ in range(SCRAPES):
                began = time.perf_counter()
                with urllib.request.urlopen(f"http://{host}/metrics") as answer:
                    size = len(answer.read())
                runs.append(1e3 * (time.perf_counter() - began))
            computed.append((_processor_ms(pid) - before) / SCRAPES)
        load = f"load {os.getloadavg()[0]:.1f}"
        return [
            row("/metrics of 1,000 streams", runs, at_most=20, unit="ms", detail=f"{len(runs)} scrapes; {load}"),
            row("the node's processor time of one", computed, at_most=20, unit="ms", detail=load),
            row("its size", [size / 1000], at_most=200, unit="kB"),
        ]


def _processor_ms(pid: int) -> float:
    """Milliseconds of processor time of a process, ended threads included, in ticks of the kernel's clock."""
    told = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return 1e3 * (int(told[11]) + int(told[12])) / os.sysconf("SC_CLK_TCK")


MEASUREMENTS = [processor, overhead, recording, scrape]
WHOLE = [replay, demo]


def main() -> int:
    """Measure, print, write JSON. Returns 1 if a promise is not kept, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.observe", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", action="append", choices=[m.__name__ for m in [*MEASUREMENTS, *WHOLE]], help="measure only this"
    )
    parser.add_argument("--seconds", type=float, default=JOBS_S, help="limit of all pairs of a job (%(default)s)")
    parser.add_argument("--json", type=Path, default=Path("bench/results/observe.json"))
    chosen = parser.parse_args()
    rows: list[Row] = []
    ended = True
    with tempfile.TemporaryDirectory(dir="/var/tmp") as scratch:
        every: list[Callable[[Path], list[Row]]] = [*MEASUREMENTS]
        every += [functools.update_wrapper(functools.partial(each, most_s=chosen.seconds), each) for each in WHOLE]
        for measurement in every:
            if chosen.only is None or measurement.__name__ in chosen.only:
                try:
                    measured = measurement(Path(scratch))
                except TimeoutError as error:
                    print(f"{measurement.__name__}: not measured: {error}", flush=True)
                    ended = False
                    continue
                rows += measured
                print(table(measured), flush=True)
    write_json(chosen.json, rows, {})
    print(f"written to {chosen.json}")
    return 0 if ended and all(each.met for each in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
