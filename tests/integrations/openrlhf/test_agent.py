"""OpenRLHF's own executors with `LazyInputs` before them: of a prompt, pixels are made once and put once."""

from __future__ import annotations

import asyncio
import gc
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor, SingleTurnAgentExecutor
from openrlhf.utils.vlm_utils import merge_mm_train_inputs
from openrlhf_workers import Engine, LazyExecutor
from PIL import Image

import dataplane as dp
from dataplane.integrations import process
from dataplane.integrations.openrlhf import LazyInputs
from dataplane.integrations.openrlhf.agent import OwnedRow
from examples.openrlhf_rollout.__main__ import main
from examples.openrlhf_rollout.vision import Processor
from tests.integrations.marks import SYSTEMS
from tests.integrations.openrlhf.samples import same

pytestmark = SYSTEMS

PROMPT = "<vision> <image> </vision> w1"


@pytest.fixture
def processor() -> Processor:
    return Processor(56)


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    draw = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(3)]
    for path in paths:
        Image.fromarray(draw.integers(0, 255, (56, 56, 3), np.uint8)).save(path)
    return [str(path) for path in paths]


def answers(executor: Any, processor: Any, *asked: tuple[str, Any]) -> list[Any]:
    """The executor's answers to these prompts with pictures, asked at once."""

    async def all_of_them() -> list[Any]:
        params = SimpleNamespace(max_tokens=4, logprobs=None)
        return await asyncio.gather(
            *[
                executor.execute(prompt, "0", params, 4096, processor, Engine(), images=images)
                for prompt, images in asked
            ]
        )

    return asyncio.run(all_of_them())


def test_samples_of_a_prompt_share_one_handle(plane: dp.Plane, processor: Processor, pictures: list[str]) -> None:
    lazy = answers(LazyExecutor(), processor, *[(PROMPT, [pictures[0]])] * 8)
    assert processor.calls == 1
    assert len({id(each["mm_train_inputs"]) for each in lazy}) == 1
    plain = answers(SingleTurnAgentExecutor(), processor, *[(PROMPT, [pictures[0]])] * 8)
    assert processor.calls == 9
    pixels = plain[0]["mm_train_inputs"]["pixel_values"].nbytes
    assert pixels <= plane.stats().put_bytes < 1.1 * pixels + 4096
    merged = merge_mm_train_inputs([[each["mm_train_inputs"] for each in lazy]], "cpu")
    assert same(merged, merge_mm_train_inputs([[each["mm_train_inputs"] for each in plain]], "cpu"))
    for one, other in zip(lazy, plain, strict=True):
        assert {**one, "mm_train_inputs": 0} == {**other, "mm_train_inputs": 0}


def test_different_images_with_the_same_text_are_distinct(
    plane: dp.Plane, processor: Processor, pictures: list[str]
) -> None:
    found = answers(LazyExecutor(), processor, *[(PROMPT, [path]) for path in pictures])
    assert processor.calls == 3
    values = [each["mm_train_inputs"]["pixel_values"] for each in found]
    assert not torch.equal(values[0], values[1])


def test_images_given_as_objects_are_supported(plane: dp.Plane, processor: Processor, pictures: list[str]) -> None:
    image = Image.open(pictures[0])
    found = answers(LazyExecutor(), processor, *[(PROMPT, [image])] * 3, (PROMPT, [Path(pictures[0]).read_bytes()]))
    assert processor.calls == 2
    assert same(found[0]["mm_train_inputs"].read(), found[3]["mm_train_inputs"].read())


def test_prompts_without_images_store_nothing(plane: dp.Plane, processor: Processor) -> None:
    found = answers(LazyExecutor(), processor, ("w1 w2", None), ("w1 w2", [None]))
    assert [each["mm_train_inputs"] for each in found] == [None, None]
    assert plane.stats().put_bytes == 0


def test_a_finished_prompt_is_not_cached(plane: dp.Plane, processor: Processor, pictures: list[str]) -> None:
    executor = LazyExecutor()
    answers(executor, processor, (PROMPT, [pictures[0]]))
    Image.new("RGB", (56, 56)).save(pictures[0])  # the same path, another picture
    (again,) = answers(executor, processor, (PROMPT, [pictures[0]]))
    assert processor.calls == 2
    assert float(again["mm_train_inputs"]["pixel_values"].std()) < 0.5
    assert not executor._prompts_in_the_making


def test_a_sent_lazy_row_is_freed_by_its_receiver(plane: dp.Plane, processor: Processor, pictures: list[str]) -> None:
    found = answers(LazyExecutor(), processor, *[(PROMPT, [pictures[0]])] * 2)
    message = pickle.dumps(found)
    del found
    gc.collect()
    assert process.settle()
    arrived = [each["mm_train_inputs"] for each in pickle.loads(message)]  # this process draws samples: it owns them
    assert arrived[0] is arrived[1]
    assert isinstance(arrived[0], OwnedRow)
    assert arrived[0].owning
    assert arrived.pop()["pixel_values"].numel()
    assert process.settle()
    assert arrived[0]["pixel_values"].numel()
    del arrived
    gc.collect()
    assert process.settle()
    assert plane.stats().memory_used == 0


class _Game(AgentInstanceBase):
    """Shows one more picture, another one to each player."""

    paths: list[str] = []
    players = 0

    def __init__(self) -> None:
        self.turns = 0
        self.player = _Game.players
        _Game.players += 1

    async def reset(self, states: dict[str, Any], **_: Any) -> dict[str, Any]:
        return states

    async def step(self, state_dict: dict[str, Any], **_: Any) -> dict[str, Any]:
        self.turns += 1
        return {
            "rewards": torch.tensor(1.0),
            "environment_feedback": " <vision> <image> </vision> w2",
            "environment_images": [self.paths[1 + self.player % 2]],
            "done": self.turns == 2,
        }


class _LazyGames(LazyInputs, MultiTurnAgentExecutor):
    def __init__(self) -> None:
        super().__init__(_Game)


def test_multi_turn_episodes_have_the_images_of_their_turns(
    plane: dp.Plane, processor: Processor, pictures: list[str]
) -> None:
    _Game.paths, asked = pictures, [(PROMPT, [pictures[0]])] * 4
    _Game.players = 0
    lazy = answers(_LazyGames(), processor, *asked)
    assert processor.calls == 3  # of what was shown: three pictures
    _Game.players = 0
    plain = answers(MultiTurnAgentExecutor(_Game), processor, *asked)
    assert [
        same(a["mm_train_inputs"].read(), dict(b["mm_train_inputs"])) for a, b in zip(lazy, plain, strict=True)
    ] == [True] * 4
    assert len({each["mm_train_inputs"] for each in lazy}) == 2


class _Failing(LazyInputs, SingleTurnAgentExecutor):
    async def _fetch_rewards_via_func(self, *_: Any) -> Any:
        raise AssertionError

    def __init__(self) -> None:
        pass


def test_an_executor_that_fails_leaves_nothing(plane: dp.Plane, processor: Processor, pictures: list[str]) -> None:
    executor = _Failing()  # without its super().__init__(): no reward endpoints
    with pytest.raises(AttributeError):
        answers(executor, processor, (PROMPT, [pictures[0]]))
    assert not executor._prompts_in_the_making
    gc.collect()
    assert process.settle()
    assert plane.stats().memory_used == 0


# The example, small: the same steps of OpenRLHF by reference and by value give the same numbers.


def put_mib(lines: list[str]) -> float:
    (line,) = [line for line in lines if "the driver put" in line]
    return float(line.split()[3])


@pytest.mark.long
def test_the_example_has_the_same_loss_by_reference_as_by_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DATAPLANE_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")  # which it changes
    main(["--prompts", "2", "--answers", "2", "--side", "112", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    first, second = lines.index("by reference"), lines.index("by value")
    lazy, plain = lines[first:second], lines[second:]
    assert lazy[1].rpartition(",")[0] == plain[1].rpartition(",")[0]  # the loss and the reward; not the time
    assert put_mib(lazy) < put_mib(plain) / 20
