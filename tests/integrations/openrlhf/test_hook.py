"""The hook on OpenRLHF's own RayActorGroup, with real Ray actors. That workers receive the same by it: `test_loop`."""

from __future__ import annotations

import gc
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from openrlhf.trainer.ray.launcher import RayActorGroup
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from openrlhf_workers import ControllerWorker, EchoWorker, RolloutWorker
from PIL import Image

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.openrlhf import hook, install, uninstall
from dataplane.integrations.openrlhf.agent import OwnedRow
from examples.openrlhf_rollout.absent import stood_in
from examples.openrlhf_rollout.meter import Meter
from examples.openrlhf_rollout.vision import Processor
from tests.integrations.marks import SYSTEMS
from tests.integrations.openrlhf.conftest import HERE, SMALL
from tests.integrations.openrlhf.samples import experience, inputs, same
from tests.processes import eventually

pytestmark = SYSTEMS

Echo = ray.remote(num_gpus=1)(EchoWorker)
Controller = ray.remote(num_cpus=0)(ControllerWorker)
Rollout = ray.remote(num_cpus=0)(RolloutWorker)


@pytest.fixture(scope="module")
def job() -> Iterator[None]:
    """Ray, with places for workers, and no node yet."""
    process.close()
    gc.collect()
    assert process.settle()
    where = {"num_cpus": 4, "num_gpus": 4, "include_dashboard": False, "object_store_memory": 256 << 20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE), prepend=os.pathsep)
        ray.init("local", log_to_driver=False, **where)
        yield
        process.close()
        ray.shutdown()


@pytest.fixture(scope="module")
def group(job: None) -> Any:
    """Two workers, and nodes, which came with them."""
    install(SMALL)
    group = RayActorGroup(1, 2, Echo, num_gpus_per_actor=0.2)
    ray.get(group.async_init_model_from_pretrained())
    return group


@pytest.fixture
def hooked(group: Any) -> Iterator[Any]:
    install()
    yield group
    ray.get([worker.clear.remote() for worker in group._actor_handlers])
    uninstall()


def phases() -> dict[str, tuple[str, dict[str, Any]]]:
    """What OpenRLHF's controller sends, phase by phase."""
    given = [experience(4, 9 + i, seed=i) for i in range(5)]
    reward = {
        "sequences": [each.sequences for each in given],
        "attention_mask": [each.attention_mask for each in given],
    }
    forward = reward | {"action_mask": [each.action_mask for each in given]}
    return {
        "reward": ("forward", reward | {"pad_sequence": [True] * 5}),
        "actor": ("forward", forward | {"mm_train_inputs_list": [each.mm_train_inputs for each in given]}),
        "critic": ("forward", forward),
        "append": ("append", {"experience": given}),
    }


def gathered(group: Any, method: str, arguments: dict[str, Any]) -> list[Any]:
    return [each for part in ray.get(group.async_run_method_batch(method, **arguments)) for each in part]


def test_a_worker_without_a_node_gets_an_error_with_the_remedy(job: None) -> None:
    def work() -> str:
        try:
            process.plane()
        except dp.PeerUnavailable as error:
            return str(error)
        return ""

    assert "dataplane.integrations.ray.up()" in ray.get(ray.remote(num_cpus=0)(work).remote(), timeout=60)


def test_only_references_pass_through_the_controller(hooked: Any) -> None:
    sent: dict[str, int] = {}
    all_of_them = phases()
    pixels = inputs()["pixel_values"].nbytes
    for phase, (method, arguments) in all_of_them.items():
        with Meter() as meter:
            hooked.async_run_method_batch(method, **arguments)
        sent[phase] = meter.moved["put"]
    assert max(sent[phase] for phase in ("reward", "actor", "critic")) < 2 * 1536  # two slices, with what Ray adds
    assert sent["append"] < 2 * 2560
    uninstall()
    with Meter() as meter:
        hooked.async_run_method_batch(*all_of_them["actor"][:1], **all_of_them["actor"][1])
    assert meter.moved["put"] > 5 * 4 * pixels


def test_values_that_a_phase_does_not_use_are_not_read(hooked: Any) -> None:
    given = [experience(2, mm_train_inputs=[inputs(seed, 2048)] * 2) for seed in range(2)]
    pixels = given[0].mm_train_inputs[0]["pixel_values"].nbytes
    gathered(hooked, "append", {"experience": given})
    worker = hooked._actor_handlers[0]
    assert ray.get(worker.pinned.remote()) < pixels
    gathered(hooked, "merged", {"mm_train_inputs_list": [each.mm_train_inputs for each in given]})
    eventually(lambda: ray.get(worker.pinned.remote()) < pixels, "what was merged is let go")


@pytest.mark.long
def test_the_hook_is_installed_in_actors_that_receive_a_group(hooked: Any) -> None:
    controller = Controller.remote()
    _, arguments = phases()["critic"]
    uninstall()
    installed, plain = ray.get(controller.call.remote(hooked, "forward", **arguments))
    assert not installed
    install()
    installed, found = ray.get(controller.call.remote(hooked, "forward", **arguments))
    assert installed
    assert same(found, plain)
    assert same(found, gathered(hooked, "forward", arguments))
    ray.kill(controller)


def test_uninstalling_the_hook_restores_openrlhf(job: None) -> None:
    uninstall()
    before = dict(vars(RayActorGroup))
    install()
    install()
    assert vars(RayActorGroup)["async_run_method_batch"] is not before["async_run_method_batch"]
    uninstall()
    uninstall()
    assert dict(vars(RayActorGroup)) == before
    assert not hook.installed()


@pytest.mark.parametrize(
    "arguments",
    [{"a": [1, 2], "b": [1]}, {"a": []}, {"a": [1]}, {"a": 3}],
    ids=["lengths", "nothing", "fewer than workers", "no list"],
)
def test_arguments_refused_by_openrlhf_are_still_refused(hooked: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"length|iterable|Insufficient"):
        hooked.async_run_method_batch("forward", **arguments)


def test_pixels_of_a_rollout_worker_reach_the_models_and_are_freed(hooked: Any, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    Image.new("RGB", (56, 56), (200, 100, 50)).save(path)
    rollout, processor = Rollout.remote(), Processor(56)
    prompt = "<vision> <image> </vision> w1"
    responses = ray.get(rollout.generate_responses.remote(prompt, processor, [str(path)], 4))
    handles = [each["mm_train_inputs"] for each in responses]
    assert all(isinstance(each, OwnedRow) and each.owning for each in handles)
    expected = processor(text=prompt, images=[Image.open(path)])
    del expected["input_ids"]
    merged = gathered(hooked, "merged", {"mm_train_inputs_list": [handles[:2], handles[2:]]})
    assert same(merged, [merge_mm_train_inputs([[expected] * 2], "cpu")] * 2)
    ray.kill(rollout)  # what it put stays
    gathered(hooked, "append", {"experience": [experience(2, mm_train_inputs=handles[:2])] * 2})
    assert handles[0].owning
    assert same(ray.get(hooked._actor_handlers[1].appended.remote())[0].mm_train_inputs, [expected] * 2)
    ray.get([worker.clear.remote() for worker in hooked._actor_handlers])
    kept = handles[0].ref
    del responses, handles
    gc.collect()
    assert process.settle()
    with pytest.raises(dp.Freed):
        process.plane().get(kept)


def test_a_killed_worker_blocks_nothing_and_its_memory_is_freed(hooked: Any) -> None:
    lone = RayActorGroup(1, 1, Echo, num_gpus_per_actor=0.2)
    ray.get(lone.async_init_model_from_pretrained())
    given = [experience(2, seed=i) for i in range(2)]
    gathered(lone, "append", {"experience": given})
    with pytest.raises(ray.exceptions.RayActorError):
        gathered(lone, "die", {"wait": [given[0].sequences, given[1].sequences]})
    assert len(gathered(hooked, "append", {"experience": given})) == 2
    ray.get([worker.clear.remote() for worker in hooked._actor_handlers])
    del given
    gc.collect()

    def empty() -> bool:
        assert process.settle()
        return process.plane().stats().memory_used == 0

    eventually(empty, "what the dead one held is free")


def test_a_dead_node_is_an_error_and_all_processes_end_with_the_job(group: Any) -> None:
    install()
    given = [experience(2, seed=i) for i in range(2)]
    sent = {"sequences": [each.sequences for each in given]}
    assert same(gathered(group, "forward", sent), [{"sequences": each.sequences} for each in given])
    node = process.plane().stats().pid
    pids = [node, *ray.get([worker.pid.remote() for worker in group._actor_handlers])]
    os.kill(node, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayTaskError, match="has gone"):  # by a worker
        ray.get(group.async_run_method_batch("forward", **sent), timeout=60)
    with pytest.raises(dp.PeerUnavailable, match="has gone"):  # by the controller
        group.async_run_method_batch("forward", sequences=[torch.rand(2, 2), torch.rand(2, 2)])
    uninstall()
    process.close()
    ray.shutdown()
    eventually(lambda: not any(map(psutil.pid_exists, pids)), "the node and the workers have ended", timeout_s=60)


# `python -m dataplane.integrations.openrlhf`: OpenRLHF's own command with the hook installed.

ROOT = Path(__file__).parents[3]


def test_the_command_accepts_the_options_of_openrlhf(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    assert not hook.installed()
    try:
        with stood_in(), pytest.raises(SystemExit) as ended:
            runpy.run_module("dataplane.integrations.openrlhf", run_name="__main__")
        assert ended.value.code == 0
        assert "--train.agent_func_path" in capsys.readouterr().out
        assert hook.installed()
    finally:
        hook.uninstall()


def test_importing_the_integration_does_not_import_openrlhf() -> None:
    code = "import sys, dataplane.integrations.openrlhf; print(sorted({'openrlhf', 'ray', 'torch'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == "[]"
