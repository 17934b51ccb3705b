"""Tests the bytes and pages of a cache."""

from qerl_jax.generation import kv_capacity
from qerl_jax.model import architecture


def test_the_workspace_holds_scores_and_the_largest_prefill():
    arch = architecture.KNOWN["qwen2.5-7b"]
    demand = kv_capacity.Demand(arch, 64, 64, 1025, 2048, 64, compact=False, itemsize=2)
    assert demand.workspace(8) == {
        "scores": 4 * 8 * arch.vocab_size * 4,
        "prefill": 8192 * (3 * arch.ffn_width + 4 * arch.width) * 2,
    }


def test_rows_of_an_evaluation_take_two_fifths_of_the_memory():
    arch = architecture.KNOWN["qwen2.5-7b"]
    row = 1000 * 2 * arch.num_layers * arch.kv_width * 2
    assert kv_capacity.rows_that_fit(arch, 10 * row, 1000, 2) == 4
    assert kv_capacity.rows_that_fit(arch, row, 1000, 2) == 1  # one at least
    assert kv_capacity.rows_that_fit(arch, None, 1000, 2) == int(0.4 * 16e9 / row)


def test_as_many_rows_are_sampled_at_a_time_as_never_wait():
    arch = architecture.KNOWN["qwen2.5-7b"]

    def best(rows, pages=lambda slots: None, fused_rows=0):
        # A row is expected to need 3 of 12 tokens; pages have one, and two are for scratch and a copy.
        options = {"compact": True, "itemsize": 2, "fused_rows": fused_rows}
        demand = kv_capacity.Demand(arch, rows, 1, 1, 12, 1, **options)
        return demand.slots(None, lambda slots: (n := pages(slots)) and n - 2)

    assert best(96) == 96 and best(2000) == kv_capacity.MOST_SLOTS
    # What is beside the cache grows with the rows.
    offered = lambda slots: 700 - slots // 2
    assert best(100, offered) == 100
    assert best(512, offered) == 192  # 199 would fit
    # More than 128 rows, up to 256, are no faster than 128.
    chosen = [best(n, fused_rows=128) for n in (96, 128, 129, 192, 256, 257)]
    assert chosen == [96, 128, 128, 128, 128, 257]
    assert best(512, offered, fused_rows=128) == 128  # 199 would fit
    assert [best(512, lambda _, n=n: n) for n in (97, 76, 25, 16, 3)] == [32, 24, 8, 5, 1]
