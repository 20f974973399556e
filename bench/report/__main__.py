"""Make the report of the files in bench/results: an HTML page, and the tables of docs/benchmarks.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.report.markdown import NoMarkers, between, text
from bench.report.page import html
from bench.report.results import read


def main(arguments: list[str] | None = None) -> int:
    """Read the results, write the page and the tables, print which files are missing. Returns 1 without results or
    markers, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__)
    parser.add_argument(
        "--results", type=Path, default=Path("bench/results"), help="the benchmarks' files (%(default)s)"
    )
    parser.add_argument("--html", type=Path, help="the page that is written (default: report.html beside them)")
    parser.add_argument("--docs", type=Path, default=Path("docs/benchmarks.md"), help="with markers (%(default)s)")
    asked = parser.parse_args(arguments)
    found = read(asked.results)
    for sentence in found.missing:
        print(sentence)
    if not found.files:
        print(f"there is nothing to report in {asked.results}", file=sys.stderr)
        return 1
    try:
        page = between(asked.docs.read_text(), text(found))
    except (NoMarkers, FileNotFoundError) as error:
        print(f"{asked.docs}: {error}", file=sys.stderr)
        return 1
    asked.docs.write_text(page)
    there = asked.html or asked.results / "report.html"
    there.write_text(html(found))
    print(f"written: {there}, {asked.docs}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
