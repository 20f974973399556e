"""The policy: a small vision model that reads the patches of an image and answers with one of ten tokens.

Its input is that of a large model: the patches of all images of a batch, packed without padding, and their grids. Each
patch is embedded, the embeddings are averaged over the cells of an 8 x 8 grid, and two layers compute the logits.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

import dataplane as dp
from examples.multimodal_grpo.patches import PATCH_VALUES, positions

CELLS = 8
ANSWERS = 10


class Policy(nn.Module):
    """Computes logits over the answers for a batch of images. Policies with the same seed are equal in all
    processes."""

    def __init__(self, seed: int, width: int = 8, hidden: int = 128) -> None:
        super().__init__()
        random = torch.random.get_rng_state()
        torch.manual_seed(seed)
        self.embed = nn.Linear(PATCH_VALUES, width)
        self.head = nn.Sequential(
            nn.LayerNorm(CELLS * CELLS * width),
            nn.Linear(CELLS * CELLS * width, hidden),
            nn.GELU(),
            nn.Linear(hidden, ANSWERS),
        )
        nn.init.zeros_(self.head[-1].weight)  # at first, all answers have the same probability
        nn.init.zeros_(self.head[-1].bias)
        torch.random.set_rng_state(random)

    def forward(self, batch: dp.Batch) -> Tensor:
        """The logits, `[images, 10]`, for the columns `pixel_values` and `image_grid_thw`."""
        grids = batch["image_grid_thw"].numpy()
        cells = torch.from_numpy(np.concatenate([_cells(h, w) + i * CELLS**2 for i, (_, h, w) in enumerate(grids)]))
        patches, _ = batch["pixel_values"].packed()  # of all images, unpadded
        embedded = self.embed(patches)
        count = len(grids) * CELLS**2
        summed = embedded.new_zeros(count, embedded.shape[1]).index_add(0, cells, embedded)
        average = summed / torch.bincount(cells, minlength=count).clamp(min=1)[:, None]
        return self.head(average.reshape(len(grids), -1))

    def load_batch(self, weights: dp.Batch) -> None:
        """Load weights that were put as columns of one row."""
        self.load_state_dict({name: column.torch()[0] for name, column in weights.items()})


def _cells(lines: int, columns: int) -> np.ndarray:
    line, column = positions(lines, columns)
    return line * CELLS // lines * CELLS + column * CELLS // columns
