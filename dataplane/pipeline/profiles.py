"""Layer costs of published models, by formula from their configurations.

The sizes are those of each model's `config.json` as its makers publish it on Hugging Face, named in `Sizes.source`.
Costs are for a micro-batch of one sequence, in bfloat16:

- A product with weights of n parameters takes 2 n operations a token forward, and as many for the gradient of its input
  and for that of its weights ("Scaling Laws for Neural Language Models", arXiv 2001.08361, section 2.1).
- Scores and values of attention take 4 * heads * head_dim * s' operations a token forward, where s' is half of the
  sequence, or the window where that is less; backward twice that, all of it for the input. Experts count as many as a
  token is sent to.
- A Mamba-2 layer's scan takes 6 * heads * head_dim * state operations a token ("Transformers are SSMs", arXiv
  2405.21060).
- Seconds are operations over `FLOPS`, the same for all: only the ratios between layers matter to a plan.
- State is 18 bytes a parameter: weights and gradients in two and four bytes, Adam's in twelve; experts are shared by
  `experts_over` workers. Activations are 34 bytes a token and hidden value ("Reducing Activation Recomputation", arXiv
  2205.05198, equation 2, without the scores, which are recomputed), half of which the gradients of weights still need;
  of the head, its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataplane.pipeline.models import Layer, Model

FLOPS = 400e12
"""Operations a second: 40 % of an H100's bfloat16 peak of 989e12."""

_STATE = 18.0
_KEPT = 34.0


@dataclass(frozen=True)
class Sizes:
    """The sizes of a published model. `pattern`: one character for each layer: `*` attention and feed-forward; `l` as
    `*`, with windowed attention; `d` as `*`, with a dense feed-forward in a model whose other layers have experts;
    `a` attention alone; `-` feed-forward alone; `M` Mamba-2."""

    source: str
    hidden: int
    pattern: str
    vocabulary: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    window: int = 0
    experts: int = 0
    experts_used: int = 0  # by a token, shared ones included
    expert_width: int = 0
    experts_over: int = 8
    attention_parameters: int = 0  # of latent attention, where they do not follow from the heads; 0: by heads
    state_size: int = 0
    inner: int = 0
    tied: bool = False
    predicted: int = 1  # tokens that are predicted at a time: the number of heads, and of additional layers plus one
    vision_layers: int = 0
    vision_hidden: int = 0
    vision_feed_forward: int = 0
    vision_patches: float = 0.0  # patches a token of the sequence


SIZES = {
    "llama3_8b": Sizes("meta-llama/Llama-3.1-8B", 4096, "*" * 32, 128256, 14336, 32, 8),
    "gemma3_27b": Sizes(
        "google/gemma-3-27b-pt", 5376, "lllll*" * 10 + "ll", 262208, 21504, 32, 16, window=1024, tied=True
    ),
    "qwen3_30b_a3b": Sizes(
        "Qwen/Qwen3-30B-A3B", 2048, "*" * 48, 151936, 6144, 32, 4, experts=128, experts_used=8, expert_width=768
    ),
    "deepseek_v3": Sizes(
        "deepseek-ai/DeepSeek-V3",
        7168,
        "ddd" + "*" * 58,
        129280,
        18432,
        128,
        128,
        head_dim=160,  # scores over 192, values over 128
        experts=256,
        experts_used=9,
        expert_width=2048,
        experts_over=64,
        attention_parameters=7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168,
        predicted=2,
    ),
    "qwen25_vl_7b": Sizes(
        "Qwen/Qwen2.5-VL-7B-Instruct",
        3584,
        "*" * 28,
        152064,
        18944,
        28,
        4,
        vision_layers=32,
        vision_hidden=1280,
        vision_feed_forward=3420,
        vision_patches=2.0,  # half of the tokens are of images, four patches each
    ),
    "nemotron_h_8b": Sizes(
        "nvidia/Nemotron-H-8B-Base-8K",
        4096,
        "M-M-M-Ma-M-M-M-M-Ma-M-M-M-M-Ma-M-M-M-M-Ma-M-M-M-M-M-",
        131072,
        21504,
        32,
        8,
        state_size=128,
        inner=8192,
    ),
}


def model(name: str, tokens: int = 4096) -> Model:
    """The `Model` of the configuration `SIZES[name]`, for micro-batches of `tokens` tokens. Raises ValueError for
    another name."""
    if name not in SIZES:
        raise ValueError(f"{name} is none of {', '.join(SIZES)}")
    sizes = SIZES[name]
    layers = [_vision(sizes, tokens)] * sizes.vision_layers
    layers.append(_embedding(sizes, tokens))
    layers += [_block(sizes, kind, tokens) for kind in sizes.pattern]
    layers += [_block(sizes, "*", tokens)] * (sizes.predicted - 1)
    layers += [_head(sizes, tokens)] * sizes.predicted
    return Model(name, layers)


def body(name: str) -> tuple[int, int]:
    """The first and the end of the layers for equal chunks: all but the embedding at the begin and the head. Layers of
    a vision encoder count like the decoder's."""
    sizes = SIZES[name]
    first = 0 if sizes.vision_layers else 1
    return first, sizes.vision_layers + 1 + len(sizes.pattern)


def _layer(name: str, parameters: float, used: float, scores: float, hidden: int, tokens: float, kept: float) -> Layer:
    """The costs of a layer. used: parameters by which a token is multiplied; scores: operations a token without
    weights; kept: bytes a token."""
    linear = 2 * used * tokens / FLOPS
    mixed = scores * tokens / FLOPS
    activations = kept * tokens
    return Layer(
        name,
        linear + mixed,
        linear + 2 * mixed,
        linear,
        activations,
        activations / 2,
        _STATE * parameters,
        2.0 * hidden * tokens,
    )


def _block(sizes: Sizes, kind: str, tokens: int) -> Layer:
    hidden, wide = sizes.hidden, sizes.heads * sizes.head_dim
    parameters = used = scores = 0.0
    if kind in "*lda":
        own = sizes.attention_parameters or 2 * hidden * wide + 2 * hidden * sizes.kv_heads * sizes.head_dim
        reach = min(tokens / 2, sizes.window) if kind == "l" and sizes.window else tokens / 2
        parameters, used, scores = own, own, 4.0 * wide * reach
    if kind in "*ld-":
        matrices = 2 if sizes.state_size else 3  # Nemotron-H squares a ReLU and has no gate
        if sizes.experts and kind == "*":
            one = 3 * hidden * sizes.expert_width
            parameters += one * sizes.experts / sizes.experts_over + hidden * sizes.experts
            used += one * sizes.experts_used + hidden * sizes.experts
        else:
            parameters += matrices * hidden * sizes.feed_forward
            used += matrices * hidden * sizes.feed_forward
    if kind == "M":
        own = hidden * (2 * sizes.inner + 2 * 8 * sizes.state_size + sizes.inner // 64) + sizes.inner * hidden
        parameters, used, scores = own, own, 6.0 * sizes.inner * sizes.state_size
    names = {
        "*": "block",
        "l": "window block",
        "d": "dense block",
        "a": "attention",
        "-": "feed-forward",
        "M": "Mamba-2",
    }
    half = 0.5 if kind in "a-M" else 1.0
    return _layer(names[kind], parameters, used, scores, hidden, tokens, _KEPT * hidden * half)


def _vision(sizes: Sizes, tokens: int) -> Layer:
    hidden, patches = sizes.vision_hidden, sizes.vision_patches * tokens
    own = 4.0 * hidden * hidden + 3.0 * hidden * sizes.vision_feed_forward
    return _layer("vision block", own, own, 4.0 * hidden * 64, hidden, patches, _KEPT * hidden)  # windows of 64 patches


def _embedding(sizes: Sizes, tokens: int) -> Layer:
    parameters = float(sizes.vocabulary * sizes.hidden)
    moved = 4.0 * sizes.hidden  # a row is read and written: at the pace of memory, some 300 operations a byte
    return _layer("embedding", parameters, moved / 2 * 300 / 2, 0.0, sizes.hidden, tokens, 2.0 * sizes.hidden)


def _head(sizes: Sizes, tokens: int) -> Layer:
    own = float(sizes.vocabulary * sizes.hidden)
    return _layer("head", 0.0 if sizes.tied else own, own, 0.0, sizes.hidden, tokens, 6.0 * sizes.vocabulary)
