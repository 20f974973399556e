"""The structure graph of sources."""

from __future__ import annotations

from dataplane.diagnosis.structure import analysed

SOURCE = """
import dataplane as dp

def score(rows):
    total = []
    for row in rows:
        if row:
            total.append(row)
    return total

def push(stream, rows):
    stream.append(rows)

def work(address, lock):
    with dp.connect(address) as plane:
        stream = plane.stream("rollouts")
        for delivery in stream.deliveries("reward", rows=4, columns=["ids"]):
            found = score(delivery.get())
            with lock:
                found.sort()
            thread.join()
            text = ", ".join(found)
            stream.extend(delivery.ref, found)
            push(stream, found)
"""
LINES = {
    name: SOURCE.splitlines().index(line) + 1
    for name, line in {
        "loop of score": "    for row in rows:",
        "append of a list": "            total.append(row)",
        "deliveries": '        for delivery in stream.deliveries("reward", rows=4, columns=["ids"]):',
        "get": "            found = score(delivery.get())",
        "lock": "            with lock:",
        "join": "            thread.join()",
        "text": '            text = ", ".join(found)',
        "push": "            push(stream, found)",
    }.items()
}


def test_waits_for_locks_and_threads_are_told_from_the_join_of_a_text() -> None:
    structure = analysed(SOURCE)
    assert structure.of(LINES["lock"]).kind == "lock"
    assert structure.of(LINES["join"]).kind == "lock"
    assert structure.of(LINES["text"]).kind != "lock"
