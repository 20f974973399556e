"""Made workloads against the tables of the even steps, and what holds of all of them."""

from __future__ import annotations

from bench.workloads import TASKS, generate
from bench.workloads.distance import distance, figures
from bench.workloads.tables import task
from bench.workloads.trace import ARRAYS
from tests.cases import each_case

each_task = each_case("name", TASKS)


@each_task
@each_case("seed", [0, 1, 2])
@each_case(("prompts", "steps"), [(32, 16), (512, 1)])
def test_distributions_are_those_of_the_even_steps(name: str, seed: int, prompts: int, steps: int) -> None:
    trace = generate(name, prompts=prompts, steps=steps, seed=seed)
    distances = {column: distance(made, other) for column, made, other in figures(trace)}
    sums = distances.pop("total_tokens", 0.0)
    assert max(distances.values()) <= 0.03, distances
    assert sums <= 0.036


@each_task
def test_what_holds_of_every_step(name: str) -> None:
    known = task(name)
    for step in generate(name, prompts=100, steps=3).steps:
        first = step.offsets[:-1]
        assert (step.turn_input_tokens[first] == step.input_tokens[step.group]).all()
        assert (step.vision_tokens <= step.input_tokens).all()
        assert (step.tool_seconds[step.offsets[1:] - 1] == 0).all()
        assert not any(getattr(step, array).flags.writeable for array in ARRAYS)
        if known.output_clip:
            assert step.turn_output_tokens.max() <= known.output_clip
        assert step.images.any() == (known.modality in ("image", "video"))
        assert (step.turns > 1).any() == ("multi-turn" in known.modality)
