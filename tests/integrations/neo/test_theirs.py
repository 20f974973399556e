"""verl's own tests of NeoProto, with the plane's engine where they take `InMemoryStorageEngine`.

Five of them count the calls of `get` and `get_many` of the engine that they derive, which one that reads rows
(`get_rows_many`) answers in others: all pass with the engine as verl's own has it, without those; all but the five with
ours as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import verl

ROOT = Path(__file__).parents[3]
THEIRS = Path(verl.__file__).parents[1] / "tests" / "experimental" / "neoproto"
COUNTING = (
    "test_worker_bridge_subset_skips_unused_columns",
    "test_worker_bridge_subset_fetches_fewer_than_full",
    "test_driver_operations_are_metadata_only",
    "test_int_index_prefetches_parent_chunk_only_once",
    "test_prefetch_batches_shared_refs_by_backend",
)

pytestmark = pytest.mark.skipif(not THEIRS.is_dir(), reason="this copy of verl has no tests: take a checkout")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("reads", ["one by one", "rows"])
def test_the_tests_of_neo_proto_pass_with_the_storage_engine(plane: Any, reads: str, tmp_path: Path) -> None:
    plugin = "substitute"
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, f"--rootdir={THEIRS}", "-c", os.devnull, str(THEIRS)]
    places = [str(ROOT), str(Path(__file__).parent), str(THEIRS.parents[2])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "NEO_READS": reads}
    if reads == "rows":
        command += ["-k", " and ".join(f"not {name}" for name in COUNTING)]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path / 't'}"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
