"""What `bench.doors_fit` makes of the calls that a run wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.doors_fit import MIB, Memory, read, rows_of


def call(name: str, *spans: tuple[float, float], partition: str | None = "train", **more: Any) -> dict[str, Any]:
    return {"name": name, "partition": partition, "start": spans[0][0], "end": spans[-1][1], "spans": spans, **more}


def test_a_run_is_read_without_its_first_step_and_without_waiting_that_is_nobodys(tmp_path: Path) -> None:
    trainer = [
        call("kv_batch_put", (0, 1), private=70),
        call("kv_clear", (8, 9), stored=500, private=-30),
        call("kv_clear", (9, 10), stored=300),
        call("kv_batch_put", (11, 12)),
        call("kv_list", (12, 30)),
        call("kv_clear", (30, 31), stored=700),
        call("kv_clear", (31, 32), stored=100),
    ]
    loop = [
        call("kv_batch_put", (2, 4), bytes=1000),
        {"threads": 3.0, "at": 4.0},
        {"threads": 4.0, "at": 9.0},
        call("kv_batch_put", (14, 15), (18, 19), bytes=3000),  # and something else between
        {"threads": 4.5, "at": 19.0},
    ]
    rank = [
        call("_meta_to_realdata", (5, 6), partition=None, private=80),
        call("_meta_to_realdata", (18.5, 20), partition=None, private=60),
    ]
    for name, lines in {"1": trainer, "2": loop, "3": rank}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert read(tmp_path, 2) == {
        "by_call": {  # of the second step: how many, seconds, and of these processor time, which nobody said
            "agent loop kv_batch_put": (1, 2.0, 0.0),
            "driver kv_batch_put": (1, 1.0, 0.0),
            "driver kv_clear": (2, 2.0, 0.0),
            "driver kv_list": (1, 18.0, 0.0),
            "rank _meta_to_realdata": (1, 1.5, 0.0),
        },
        "began": 0,
        "storage_s": 1 + 1 + 2 + 2,
        "beside_s": 0.5,
        "stored": 700,
        "logical": 2000,
        "gets": 80,
        "calls": 40,
    }


def test_the_promises_are_ours_over_theirs() -> None:
    mib = 1 << 20
    theirs = {"storage_s": 4.0, "beside_s": 1.0, "step_s": 10.0, "stored": 0, "driver": 40 * mib}
    theirs |= {"worker": 200 * mib, "gets": 100 * mib, "calls": 90 * mib}
    ours = {
        "storage_s": 0.25,
        "beside_s": 0.25,
        "step_s": 5.0,
        "stored": 13 * mib,
        "logical": 100 * mib,
        "driver": 10 * mib,
    }
    ours |= {"worker": 20 * mib, "gets": 0, "calls": 2 * mib}
    rows = rows_of([{"SimpleStorage": theirs, "Dataplane": ours, "module": ours}])
    assert {row.name: (row.value, row.met) for row in rows if row.name.startswith("module")} == {
        "module: storage's share": (0.2, True),
        "module: stored / logical x 8": (1.04, True),
        "module: driver, peak": (0.25, False),
        "module: driver, storage's calls over its peak": (0.05, True),
        "module: worker, peak": (0.1, True),
        "module: worker's gets, peak": (0.01, True),
    }


def test_what_a_role_took_is_what_its_processes_grew_by_as_they_trained() -> None:
    """Not what one had that was forked later, and called like its parent."""
    memory = Memory()
    memory.samples["driver", 1] = [(0.0, 300 * MIB), (1.0, 500 * MIB), (2.0, 542 * MIB), (3.0, 510 * MIB)]
    memory.samples["driver", 2] = [(1.5, 10 * MIB), (2.5, 577 * MIB)]
    memory.samples["worker", 3] = [(0.5, 600 * MIB), (2.0, 700 * MIB)]
    assert memory.grown("driver", began=1.2) == 42 * MIB
    assert memory.grown("unit", began=1.2) == 0
