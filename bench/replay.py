"""Replays RL steps as processes on the plane, and measures their memory and how near their times are to the trace's.

Rollout workers append responses after the time that their tokens and tools take. A reward stage and a reference model
add columns, and the ranks of a trainer consume a step's rows. All use one stream: first synchronously, then with rows
that are a policy version old. Nothing is computed. The waits are real, divided by --speed. The bytes are real, too:
tokens and log-probabilities by their lengths, and pixels by their patches, scaled by --payload-scale. Readers verify
checksums. The times are compared with those that the trace implies if moving data takes no time.

    python -m bench.replay                                                      under a minute on two cores
    python -m bench.replay search_7b --prompts 64 --samples 8 --speed 4
    python -m bench.replay video_understanding_7b --prompts 64 --samples 8 --memory 2GiB --payload-scale 1
    python -m bench.replay trace.json --steps 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dataplane as dp
from bench.measure import Row, table, write_json
from bench.replaying import report
from bench.replaying.fitting import room, why_not
from bench.replaying.implied import implied
from bench.replaying.plan import Pace, Plan, Ranks
from bench.replaying.running import Broken, Replayed, check, run
from bench.workloads import TASKS, Trace, generate, read

STARTING_S = 120.0  # limit of a run, beyond five times the implied time


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay, print, write JSON. Returns 1 if a promise is not kept or a run fails, 2 if arguments are invalid or the
    rows would not fit, else 0."""
    chosen = _parser().parse_args(arguments)
    try:
        trace = _trace(chosen)
        config = dp.NodeConfig(memory=chosen.memory, spill=chosen.spill, spill_dir=chosen.spill_dir)
    except (ValueError, dp.DataplaneError) as error:
        print(error, file=sys.stderr)
        return 2
    plans = [
        _plan(chosen, trace, lag)
        for lag in ([0] * (chosen.mode != "async") + [chosen.max_lag] * (chosen.mode != "sync"))
    ]
    for plan in plans:
        if reason := why_not(plan, *room(config)):
            print(f"{plan.name}: {reason}", file=sys.stderr)
            return 2
    return _replay(plans, config, chosen)


def _replay(plans: list[Plan], config: dp.NodeConfig, chosen: argparse.Namespace) -> int:
    rows: list[Row] = []
    extra: dict[str, Any] = {}
    for plan in plans:
        expected = implied(plan)
        patience_s = STARTING_S + 5 * expected.trained[-1]
        print(_head(plan, expected.trained[-1]), flush=True)
        found: list[Replayed] = []
        for _ in range(chosen.runs):
            try:
                found.append(run(plan, config, patience_s))
                check(plan, found[-1])
            except Broken as error:
                print(error, file=sys.stderr)
                return 1
        measured = report.rows(plan, expected, found, config.memory_bytes)
        print(table(measured) + "\n" + report.stalls(found[-1]), flush=True)
        rows += measured
        extra[plan.name] = report.content(plan, expected, found)
    write_json(chosen.json, rows, extra)
    print(f"all rows verified; written to {chosen.json}")
    return 0 if all(each.met for each in rows) else 1


def _head(plan: Plan, seconds: float) -> str:
    steps = plan.trace.steps
    stored = sum(plan.stored_bytes(step) for step in steps) / len(steps)
    return (
        f"\n{plan.trace.name}, {plan.name}: {len(steps)} steps of {plan.rows / len(steps):.0f} rows and "
        f"{stored / 2**20:.0f} MiB, by {plan.processes} processes; {seconds:.1f} s are implied"
    )


def _trace(chosen: argparse.Namespace) -> Trace:
    name = {"video": "video_understanding_7b"}.get(chosen.workload, chosen.workload)
    if name in TASKS:
        return generate(
            name, prompts=chosen.prompts or 8, samples=chosen.samples or 4, steps=chosen.steps or 2, seed=chosen.seed
        )
    if not Path(name).exists():
        raise ValueError(f"{name} is no file, and none of the tasks: {', '.join(TASKS)}")
    if chosen.prompts:
        raise ValueError("--prompts is for tasks; a trace file has its own")
    trace = read(name, group_size=chosen.samples)
    return Trace(trace.name, trace.modality, trace.source, trace.steps[: chosen.steps])


def _plan(chosen: argparse.Namespace, trace: Trace, max_lag: int) -> Plan:
    return Plan(
        trace,
        Pace(chosen.token_seconds, chosen.reference_token_seconds, chosen.train_token_seconds, chosen.speed),
        workers=chosen.workers,
        slots=chosen.slots,
        reference=chosen.reference,
        trainer=chosen.trainer,
        max_lag=max_lag,
        micro=chosen.micro,
        payload_scale=chosen.payload_scale,
    )


def _count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not more than 0")
    return value


def _parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m bench.replay", description=__doc__, formatter_class=style)
    add = parser.add_argument
    add("workload", nargs="?", default="video_understanding_7b", help="a task, or a trace file (%(default)s)")
    add("--prompts", type=_count, help="a step, of a task (8)")
    add("--samples", type=_count, help="responses to a prompt (4; a file's own)")
    add("--steps", type=_count, help="(2; of a file, all)")
    add("--seed", type=int, default=0, help="of a task's trace (%(default)s)")
    add("--mode", choices=["sync", "async", "both"], default="both", help="(%(default)s)")
    add("--max-lag", type=_count, default=1, help="asynchronous: policy versions a row may be old (%(default)s)")
    add("--workers", type=_count, default=2, help="rollout workers (%(default)s)")
    add("--slots", type=_count, default=8, help="responses that each makes at a time (%(default)s)")
    add("--reference", type=Ranks.of, default=Ranks(1, 1), metavar="DPxTP", help="its ranks (1x1)")
    add("--trainer", type=Ranks.of, default=Ranks(2, 2), metavar="DPxTP", help="its ranks (2x2)")
    add("--micro", type=_count, default=4, help="rows that a rank reads at a time (%(default)s)")
    pace = Pace()
    add("--token-seconds", type=_positive, default=pace.token_s, help="a token of a response (%(default)s)")
    add(
        "--reference-token-seconds",
        type=_positive,
        default=pace.reference_token_s,
        help="a token of a row (%(default)s)",
    )
    add("--train-token-seconds", type=_positive, default=pace.train_token_s, help="a token of a row (%(default)s)")
    add("--speed", type=_positive, default=2.0, help="times as fast as the job (%(default)s)")
    add("--payload-scale", type=_positive, default=0.25, help="part of the pixels that rows carry (%(default)s)")
    add("--memory", default="1GiB", help="the node's budget (%(default)s)")
    add("--spill", help="its disk budget (four times that, at most half of what is free)")
    add("--spill-dir", type=Path, help="a directory on a disk (/var/tmp)")
    add("--runs", type=_count, default=1, help="(%(default)s)")
    add("--json", type=Path, default=Path("bench/results/replay.json"), help="(%(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
