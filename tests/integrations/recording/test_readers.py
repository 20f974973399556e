"""Recordings, read by pandas, Polars, DuckDB and datasets: the values that were put, by none of our code."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import dataplane as dp

pytestmark = pytest.mark.leaks(reason="Polars, DuckDB and datasets keep threads of their own and what those wait on")

ROWS = 6


def picture() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((128, 128), 80).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def columns() -> dict[str, Any]:
    return {
        "response_ids": [np.arange(n, dtype=np.int32) for n in range(ROWS)],
        "advantage": np.arange(ROWS, dtype=np.float32) / 3,
        "grid": np.arange(ROWS * 6, dtype=np.int64).reshape(ROWS, 2, 3),
        "patches": [np.full((n, 4), n, np.float16) for n in range(ROWS)],
        "hidden": torch.arange(ROWS * 2).reshape(ROWS, 2).bfloat16(),
        "answer": [f"ä{n}" for n in range(ROWS)],
        "image": [picture()] * ROWS,
        "extra": [{"n": n} if n % 2 else {"n": n, "s": "x"} for n in range(ROWS)],
        "when": np.arange(ROWS).astype("datetime64[s]"),
        "any": [None, 1, "x", (1, 2), {"k": 1}, [1]],
    }


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory, columns: dict[str, Any]) -> Path:
    path = tmp_path_factory.mktemp("r")
    with dp.connect(config=dp.NodeConfig(memory="32MiB", spill=0, prewarm=0)) as plane:
        stream = plane.stream("rollouts", ["record"])
        for version in range(2):
            stream.append(columns, group=[f"g{version}"] * 3 + [7] * 3, version=version, tags={"domain": "math"})
            with stream.record(path):
                pass
    assert len(list((path / "rows").iterdir())) == 2
    return path


def test_pandas_reads_a_recording(recording: Path, columns: dict[str, Any]) -> None:
    import pandas as pd

    frame = pd.read_parquet(recording / "rows")
    assert frame["__version__"].tolist() == [0] * ROWS + [1] * ROWS
    assert frame["__group__"].tolist() == (["g0"] * 3 + ["7"] * 3 + ["g1"] * 3 + ["7"] * 3)
    for row in range(2 * ROWS):
        n = row % ROWS
        assert frame["response_ids"][row].tolist() == list(range(n))
        assert frame["grid"][row].tolist() == columns["grid"][n].reshape(-1).tolist()
        assert frame["patches"][row]["data"].tolist() == [n] * 4 * n
        assert frame["hidden"][row].view(np.int16).tolist() == columns["hidden"][n].view(torch.int16).tolist()
        assert frame["answer"][row] == columns["answer"][n]
    assert np.array_equal(frame["advantage"].to_numpy()[:ROWS], columns["advantage"])
    media = pd.read_parquet(recording / "media").set_index("media")["data"]
    assert [media[each] for each in frame["image"]] == columns["image"] * 2
    assert len(media) == 1


def test_datasets_reads_a_recording(
    recording: Path, columns: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets

    datasets.disable_progress_bars()
    files = sorted(map(str, (recording / "rows").iterdir()))
    found = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(tmp_path))
    assert found.num_rows == 2 * ROWS
    for row, each in enumerate(found):
        n = row % ROWS
        assert each["response_ids"] == list(range(n))
        assert each["grid"] == columns["grid"][n].reshape(-1).tolist()
        assert each["patches"]["shape"] == [n, 4]
        assert each["answer"] == columns["answer"][n]
        assert each["extra"]["n"] == n
