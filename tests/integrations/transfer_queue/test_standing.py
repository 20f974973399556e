"""Standing in for the module `transfer_queue` and ceasing to, with verl imported before it and after."""

from __future__ import annotations

import copyreg
import os
import sys
import textwrap
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import transfer_queue as real
from tensordict import TensorDict
from verl.utils import transferqueue_utils

from dataplane.integrations import transfer_queue as ours
from dataplane.integrations.transfer_queue import module_patch
from dataplane.integrations.transfer_queue.module_patch import VARIABLE
from tests.integrations.marks import SYSTEMS
from tests.integrations.nursery import Nursery

pytestmark = SYSTEMS


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    ours.uninstall()


def known_to_verl() -> list[object]:
    return [transferqueue_utils.tq, transferqueue_utils.BatchMeta, transferqueue_utils.KVBatchMeta]


def test_modules_that_imported_transfer_queue_before_are_patched_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module's name, and by the names of its calls. Metadata is TransferQueue's in both: `tqbridge` takes what
    it does not know for data."""
    users, others = ModuleType("users_trainer"), ModuleType("another_module")
    users.kv_put, others.kv_put = real.kv_put, "a name of its own"  # type: ignore[attr-defined]
    for module in (users, others):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    calls = [users, real, real.interface]
    theirs, known = real.kv_put, known_to_verl()
    assert known == [real, ours.BatchMeta, ours.KVBatchMeta]
    for _ in range(2):
        ours.install()
    assert [module.kv_put for module in calls] == [ours.kv_put] * 3  # type: ignore[attr-defined]
    assert real.client.TransferQueueClient is real.interface.TransferQueueClient is ours.TransferQueueClient
    assert real.dataloader.StreamingDataset is ours.StreamingDataset
    assert others.kv_put == "a name of its own"  # type: ignore[attr-defined]
    assert known_to_verl() == known
    assert os.environ[VARIABLE] == "nested"
    for _ in range(2):
        ours.uninstall()
    assert [module.kv_put for module in calls] == [theirs] * 3  # type: ignore[attr-defined]
    assert ours.kv_put is not theirs
    assert VARIABLE not in os.environ


def test_modules_that_imported_the_replacement_are_restored_after_uninstall(nursery: Nursery) -> None:
    """Also where nobody had imported TransferQueue before. In a process of its own: a module is imported once."""
    program = """
        from dataplane.integrations import transfer_queue as ours
        ours.install()
        from verl.utils import transferqueue_utils
        assert transferqueue_utils.tq.kv_put is ours.kv_put
        ours.uninstall()
        import transfer_queue
        assert transferqueue_utils.tq.kv_put is transfer_queue.kv_put is not ours.kv_put
        tell("all is well")
    """
    with nursery.process(textwrap.dedent(program)) as process:
        assert process.hear() == "all is well"


def test_a_module_that_imported_these_calls_keeps_them_after_uninstall(monkeypatch: pytest.MonkeyPatch) -> None:
    direct = ModuleType("direct_user")
    direct.kv_put = ours.kv_put  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, direct.__name__, direct)
    ours.install()
    ours.uninstall()
    assert direct.kv_put is ours.kv_put  # type: ignore[attr-defined]


def test_an_explicit_install_lasts_beyond_the_job() -> None:
    module_patch._install_for_job(dense=False)
    ours.install()
    module_patch.leave()
    assert module_patch.is_in()
    ours.uninstall()
    module_patch._install_for_job(dense=False)
    module_patch.leave()
    assert not module_patch.is_in()


def test_rows_of_equal_lengths_are_nested_while_installed(node: str) -> None:
    """verl takes offsets of what it gets, also where the lengths happen to be equal. And from the job's `init` on
    images are pickled as their files: `verl/test_pickles.py`."""
    from PIL.PngImagePlugin import PngImageFile

    ours.install()
    ours.close()  # what earlier tests told the job
    ours.init()
    try:
        real.kv_batch_put(["a", "b"], "train", TensorDict({"responses": torch.ones(2, 2)}, batch_size=[2]))
        got = real.kv_batch_get(["b", "a"], "train")["responses"]
        assert got.offsets().diff().tolist() == [2, 2]
        assert got.to_padded_tensor(padding=0).shape == (2, 2)
        assert PngImageFile in copyreg.dispatch_table
    finally:
        ours.close()


def test_a_worker_process_may_import_either_module_first(nursery: Nursery) -> None:
    head = """
from dataplane.integrations.transfer_queue import module_patch
for name in [name for name in sys.modules if name.startswith("dataplane.integrations.transfer_queue")]:
    if not name.endswith((".module_patch", ".job")):
        del sys.modules[name]
module_patch.stand_in()
import importlib.util
importlib.util.find_spec("transfer_queue")  # as who asks whether it is there: that is no import
"""
    for first in ("transfer_queue", "dataplane.integrations.transfer_queue.streaming"):
        program = f"""{head}
import {first}
import transfer_queue
from dataplane.integrations import transfer_queue as ours
tell([transfer_queue.kv_put is ours.kv_put, transfer_queue.StreamingDataset is ours.StreamingDataset])
"""
        with nursery.process(program, **{VARIABLE: "nested"}) as process:
            assert process.hear() == [True, True]
