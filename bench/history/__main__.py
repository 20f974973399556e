"""`python -m bench.history [drafts] [schedules] [store] [--json FILE]`: by default all parts. The example has its
own measurement: `python -m examples.history_rollout --json FILE`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from bench.history import drafts, schedules, store


def stored() -> dict[str, Any]:
    """The results of `store.run` with many prompts of one response, and with fewer prompts of eight."""
    return {"many prompts": store.run(), "many responses": store.run(prompts=8_000, epochs=8)}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"drafts": drafts.run, "schedules": schedules.run, "store": stored}


def main(arguments: list[str]) -> int:
    """Run the parts, and write their figures to `--json`, if given. Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.history", description=__doc__)
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS))
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    found: dict[str, Any] = {"load before": os.getloadavg()}
    for name in options.parts or PARTS:
        found[name] = PARTS[name]()
    found["load after"] = os.getloadavg()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1, default=float)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
