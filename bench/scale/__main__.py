"""Where more hosts meet their first bottleneck: a table, JSON and a picture; the same for the same seed and costs.

`python -m bench.scale` simulates; with `--calibrate` the costs of this machine are measured, and with `--validate` the
model is held against real nodes here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.measure import machine, write_json
from bench.scale import costs, sweep

_RESULTS = Path(__file__).parents[1] / "results"


def main() -> None:
    """Measure if asked to, simulate, print and write."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="measure the costs of this machine, a minute or two")
    parser.add_argument("--validate", action="store_true", help="hold the model against 1 to 8 real nodes here")
    parser.add_argument("--costs", type=Path, help="the costs, if not those that were measured last")
    parser.add_argument("--hosts", type=int, nargs="+", default=list(sweep.HOSTS))
    parser.add_argument("--only", action="append", choices=list(sweep.JOBS), help="simulate only this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, default=_RESULTS / "scale.json")
    parser.add_argument("--png", type=Path, default=_RESULTS / "scale.png")
    chosen = parser.parse_args()
    if chosen.calibrate:
        from bench.scale import calibrate

        found, details = calibrate.measure()
        costs.write(chosen.costs or costs.MEASURED, found, machine(), details)
        print(f"costs written to {chosen.costs or costs.MEASURED}")
    known, of = costs.read(chosen.costs)
    print(f"costs of {of['cpu']}, {of['cores']} cores, commit {of['commit']}, {of['when']}")
    if chosen.validate:
        from bench.scale import validate

        compared = validate.compare(known)
        print(validate.text(compared))
        there = chosen.json.with_name("scale_validation.json")
        write_json(there, validate.rows(compared), {"costs": of, "validation": [each.as_json() for each in compared]})
        print(f"written to {there}")
    if chosen.calibrate or chosen.validate:
        print("to simulate many hosts with these costs: python -m bench.scale")
        return
    outcomes = sweep.run(chosen.only or sweep.JOBS, chosen.hosts, known, chosen.seed)
    print(sweep.table(outcomes))
    figures = {name: [each.as_json() for each in found] for name, found in outcomes.items()}
    content = {"costs": {"machine": of} | known.as_json(), "seed": chosen.seed, "outcomes": figures}
    write_json(chosen.json, [], content | {"scaling": sweep.scaling(outcomes)})
    print(f"written to {chosen.json}")
    try:
        from bench.scale import picture

        picture.draw(chosen.png, outcomes)
    except ImportError:
        print("no picture: matplotlib is not installed", file=sys.stderr)


if __name__ == "__main__":
    main()
