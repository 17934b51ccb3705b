"""The matrix products of real models, one list for tests, tuning and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Problem:
    """A linear layer, y [M, N] = x [M, K] @ W [N, K]^T.

    q, k and v are one product, and so are gate and up. `lm_head` is only listed for completeness: the recipe keeps it
    in 16 bits.
    """

    model: str
    layer: str
    n: int
    k: int


# Width, columns of the feed-forward layer, query heads, key/value heads, vocabulary and head size of each model.
_MODELS = {
    "qwen2.5-3b": (2048, 11008, 16, 2, 151936, 128),
    "qwen2.5-7b": (3584, 18944, 28, 4, 152064, 128),
    "qwen2.5-14b": (5120, 13824, 40, 8, 152064, 128),
    "qwen2.5-32b": (5120, 27648, 40, 8, 152064, 128),
    "qwen2.5-72b": (8192, 29568, 64, 8, 152064, 128),
    "llama-3.1-8b": (4096, 14336, 32, 8, 128256, 128),
    "smollm2-135m": (576, 1536, 9, 3, 49152, 64),
    "qwen2.5-0.5b": (896, 4864, 14, 2, 151936, 64),
    "qwen2.5-1.5b": (1536, 8960, 12, 2, 151936, 128),
}
PROBLEMS: tuple[Problem, ...] = tuple(
    Problem(model, layer, n, k)
    for model, (width, inner, heads, key_heads, vocabulary, size) in _MODELS.items()
    for layer, n, k in (
        ("qkv", (heads + 2 * key_heads) * size, width),
        ("o", width, heads * size),
        ("gate_up", 2 * inner, width),
        ("down", width, inner),
        ("lm_head", vocabulary, width),
    )
)
