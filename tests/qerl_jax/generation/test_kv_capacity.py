"""Bytes and pages of a cache."""

from qerl_jax.generation import kv_capacity
from qerl_jax.model import architecture


def test_the_workspace_holds_scores_and_the_largest_prefill():
    arch = architecture.KNOWN["qwen2.5-7b"]
    beside = kv_capacity.workspace(arch, 8, 64, 1025, 2)
    assert beside == {
        "scores": 4 * 8 * arch.vocab_size * 4,
        "prefill": 8192 * (3 * arch.ffn_width + 4 * arch.width) * 2,
    }
