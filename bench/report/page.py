"""The figures of `markdown`, with pictures, as one HTML page that needs no other file."""

from __future__ import annotations

import base64
from html import escape

from bench.report import results
from bench.report.plots import drawn
from bench.report.results import EXPECTED, Results, Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { border: 1px solid #ccc; padding: .25rem .5rem; text-align: left; }
th { background: #f3f3f3; } img { max-width: 100%; } .small { color: #666; font-size: 12px; } .missed { color: #b00; }
"""


def html(found: Results) -> str:
    """The page as HTML."""
    parts = ["<h1>Benchmarks</h1>"]
    peers = found.files.get("peers")
    if peers:
        faster = results.where_faster(peers)
        parts.append("<h2>Where another system is faster</h2>")
        parts.append(_list(faster) if faster else "<p>On none of the workloads and systems that were measured.</p>")
    for title, picture in drawn(found).items():
        parts.append(f"<h2>{escape(title)}</h2>")
        if isinstance(picture, bytes):
            data = base64.b64encode(picture).decode()
            parts.append(f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">')
        else:
            parts.append(f"<p>No picture: {escape(picture)}.</p>")
    for name, content in found.files.items():
        parts.append(f"<h2>{escape(EXPECTED[name][0])}</h2><p class=small>{escape(results.machine(content))}</p>")
        parts.append(_table(results.promises(content)))
        if name == "peers":
            parts += _peers(content)
    if found.missing:
        parts += ["<h2>What there are no figures of</h2>", _list(found.missing)]
    body = "\n".join(parts)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>Benchmarks</title><style>{_STYLE}</style>\n{body}\n</html>\n"
    )


def _peers(peers: dict[str, object]) -> list[str]:
    parts = [f"<p class=small>{escape(results.versions(peers))}</p>"]
    for workload in peers["workloads"]:  # type: ignore[attr-defined]
        parts.append(f"<h3>{escape(workload)}</h3><p>{escape(results.described(peers, workload))}</p>")
        parts.append(_table(results.side_by_side(peers, workload)))
    if said := results.not_measured(peers):
        parts += ["<h3>Not measured</h3>", _list(said)]
    return parts


def _cell(text: str) -> str:
    return '<td class="missed">not met</td>' if text == "**not met**" else f"<td>{escape(text)}</td>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(heading)}</th>" for heading in table.headings)
    body = "\n".join("<tr>" + "".join(map(_cell, line)) + "</tr>" for line in table.cells)
    return f"<table><tr>{head}</tr>\n{body}</table>"


def _list(sentences: tuple[str, ...] | list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"
