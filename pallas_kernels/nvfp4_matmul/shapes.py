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


def _linears(
    model: str,
    *,
    width: int,
    feed_forward: int,
    heads: int,
    key_heads: int,
    vocabulary: int,
    head_size: int = 128,
) -> tuple[Problem, ...]:
    sizes = (
        ("qkv", (heads + 2 * key_heads) * head_size, width),
        ("o", width, heads * head_size),
        ("gate_up", 2 * feed_forward, width),
        ("down", width, feed_forward),
        ("lm_head", vocabulary, width),
    )
    return tuple(Problem(model, layer, n, k) for layer, n, k in sizes)


PROBLEMS: tuple[Problem, ...] = (
    *_linears(
        "qwen2.5-3b", width=2048, feed_forward=11008, heads=16, key_heads=2, vocabulary=151936
    ),
    *_linears(
        "qwen2.5-7b", width=3584, feed_forward=18944, heads=28, key_heads=4, vocabulary=152064
    ),
    *_linears(
        "qwen2.5-14b", width=5120, feed_forward=13824, heads=40, key_heads=8, vocabulary=152064
    ),
    *_linears(
        "qwen2.5-32b", width=5120, feed_forward=27648, heads=40, key_heads=8, vocabulary=152064
    ),
    *_linears(
        "qwen2.5-72b", width=8192, feed_forward=29568, heads=64, key_heads=8, vocabulary=152064
    ),
    *_linears(
        "llama-3.1-8b", width=4096, feed_forward=14336, heads=32, key_heads=8, vocabulary=128256
    ),
    *_linears(
        "smollm2-135m",
        width=576,
        feed_forward=1536,
        heads=9,
        key_heads=3,
        vocabulary=49152,
        head_size=64,
    ),
    *_linears(
        "qwen2.5-0.5b",
        width=896,
        feed_forward=4864,
        heads=14,
        key_heads=2,
        vocabulary=151936,
        head_size=64,
    ),
    *_linears(
        "qwen2.5-1.5b", width=1536, feed_forward=8960, heads=12, key_heads=2, vocabulary=151936
    ),
)
