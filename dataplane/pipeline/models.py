"""A model as a pipeline: layers with forward and backward passes, cut into chunks of consecutive layers.

The backward pass of a chunk is one instruction or two. With two, the first computes the gradient of its input, for
which the previous chunk waits, and the second those of its weights, for which none waits (zero-bubble pipelines, arXiv
2401.10241).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dataplane.pipeline.events import Floats


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, or another indivisible piece: seconds and bytes of a micro-batch."""

    name: str
    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    #: Kept from the forward until the backward pass.
    activation_bytes: float = 0.0
    #: The part of `activation_bytes` that is kept until the gradients of the weights are computed.
    weight_bytes: float = 0.0
    #: Parameters, gradients and the optimizer's state.
    state_bytes: float = 0.0
    #: The bytes of its output, and of the gradient of the output.
    output_bytes: float = 0.0


@dataclass(frozen=True)
class Model:
    """Layers, from the first to the last. `cuts`: the layers before which a chunk may begin; None: all."""

    name: str
    layers: tuple[Layer, ...]
    cuts: tuple[int, ...] | None = None

    def __init__(self, name: str, layers: Sequence[Layer], cuts: Sequence[int] | None = None) -> None:
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "layers", tuple(layers))
        object.__setattr__(self, "cuts", None if cuts is None else tuple(cuts))
        if not self.layers:
            raise ValueError("a model has layers")

    @cached_property
    def sums(self) -> Floats:
        """float64 `[layers + 1, 6]`: sums over all layers before each. The columns are the seconds of the forward pass,
        of the gradient of inputs and of the gradients of weights, then `activation_bytes`, `weight_bytes` and
        `state_bytes`."""
        table = [
            (
                layer.forward_s,
                layer.backward_input_s,
                layer.backward_weight_s,
                layer.activation_bytes,
                layer.weight_bytes,
                layer.state_bytes,
            )
            for layer in self.layers
        ]
        return np.vstack([np.zeros(6), np.cumsum(table, axis=0)])

    @cached_property
    def outputs(self) -> Floats:
        """float64 `[layers]`: the bytes of the output of each."""
        return np.array([layer.output_bytes for layer in self.layers])

    @property
    def seconds(self) -> float:
        """The seconds of a micro-batch, in all passes."""
        return float(self.sums[-1, :3].sum())
