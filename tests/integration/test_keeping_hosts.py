"""Columns that a process of one host keeps and a process of another reads: by way of the arena."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")

import dataplane as dp
from tests.integration.keepers import same
from tests.integration.test_hosts import Host, together
from tests.integration.test_keeping import produce
from tests.processes import Worker, eventually


def test_kept_columns_are_read_by_another_host_until_their_process_dies(tmp_path: Path) -> None:
    with (
        Host(tmp_path / "one", memory="64MiB") as one,
        Host(tmp_path / "two", one, memory="64MiB") as two,
        dp.connect(one.address) as first,
        dp.connect(two.address) as second,
        Worker(produce, one.address) as producer,
    ):
        together(first, second)
        refs = [producer.ask(seed) for seed in (1, 2, 3)]
        assert same(second.get(refs[0], device="cpu"), 1)
        assert same(second.get(refs[1]), 2)
        assert int(two.facts()["fetched"]) >= 2 * refs[0].select("x").nbytes
        second.free(refs[0][4:5])
        with pytest.raises(dp.Freed):
            second.get(refs[0][3:6], device="cpu")
        assert len(second.get(refs[0][:4], device="cpu")) == 4

        producer.kill(signal.SIGKILL)

        def gone() -> bool:
            try:
                second.get(refs[2], device="cpu")
            except dp.OwnerDied as error:
                return "has gone" in str(error)
            return False

        eventually(gone, "the node noticed")
        assert same(second.get(refs[1]), 2)
