"""Tests memory plans: exact parts are exact, compiled parts are close, and what does not fit is refused."""

import dataclasses
import functools
import pathlib
import re
import types

import jax
import numpy as np
import pytest

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.cli import main
from qerl_jax.config import ConfigError
from qerl_jax.generation.scheduler import QueuedPrompt
from qerl_jax.model import architecture, kv_cache
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import trainable
from qerl_jax.planning import cards, memory
from qerl_jax.rl import rollouts, update
from qerl_jax.training import guards, trainer

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
BENCH_7B = CONFIGS / "bench_7b.toml"
BENCH, QUICKSTART = config.load(BENCH_7B), config.load(CONFIGS / "quickstart.toml")
GSM8K = config.load(CONFIGS / "paper/gsm8k_qwen2.5_7b.toml")
FULL = config.load(CONFIGS / "paper/gsm8k_qwen2.5_3b_full.toml")
WIDE = Architecture("qwen2", 512, 64, 512, 4, 4, 2, 16)
GB = 10**9


def changed(cfg, **sections):
    return settings.run_config(cfg, sections)


def plan_of(cfg=BENCH, **sections):
    """Returns the plan of a config with other fields, without a limit."""
    return memory.plan(changed(cfg, **sections))


# For tests that pretend no other device: a plan traces the update of a 7B.
planned = functools.cache(memory.plan)


def require(plan, limit):
    """Checks a plan against another limit than that it was made for."""
    dataclasses.replace(plan, limit=int(limit)).require()


def of_items(*items):
    return dataclasses.replace(planned(BENCH, limit=80 * GB), items=items)


def all_named(plan, start):
    return [item for item in plan.items if item.name.startswith(start)]


def named(plan, start):
    (item,) = all_named(plan, start)
    return item.size


@pytest.mark.parametrize(("weights", "optimizer"), [("nvfp4", "adamw_8bit"), ("bfloat16", "adamw")])
def test_what_always_stays_is_planned_to_the_byte(weights, optimizer):
    cfg = changed(QUICKSTART, model={"weights": weights}, optim={"optimizer": optimizer})
    model, frozen, _ = load_base(cfg.model, cfg.lora)
    params, frozen = trainable(model, frozen, jax.random.key(0))
    state = update.init_state(params, cfg.optim)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((frozen, params, state.opt_state)))
    assert memory.plan(cfg).size("always") == held


@pytest.mark.parametrize(
    ("reference", "is_copied"),
    [({}, True), ({"policy": "adapter"}, True), ({"policy": "base"}, False), (None, False)],
)
def test_a_copy_of_the_adapter_that_a_run_goes_on_from_is_planned(reference, is_copied):
    model = {"adapter_name_or_path": "somewhere"}
    plan = plan_of(QUICKSTART, model=model, grpo={"reference": reference})
    sizes = [item.size for item in all_named(plan, "reference")]
    assert sizes == ([named(plan, "what trains")] if is_copied else [])


def test_rows_longer_than_the_base_was_made_for_are_refused(tmp_path):
    # Of 256 positions; prompts have up to 48.
    cfg = dataclasses.replace(QUICKSTART, output_dir=str(tmp_path / "run"))
    memory.plan(changed(cfg, rollout={"max_completion_length": 208}))
    longer = changed(cfg, rollout={"max_completion_length": 209})
    for refuse in (memory.plan, trainer.train):
        with pytest.raises(ValueError, match="max_completion_length: got 209; with a prompt of 48"):
            refuse(longer)


def test_published_sizes_of_an_adapter_and_of_packed_weights():
    made = planned(BENCH)
    # peft counts 80.7 M trained values at rank 32; 6.53e9 weights at 4.5 bits.
    assert named(made, "what trains") == pytest.approx(80.7e6 * 4, rel=1e-3)
    assert named(made, "base: linears") == pytest.approx(6.53e9 * 4.5 / 8, rel=1e-2)
    assert named(made, "optimizer") == pytest.approx(2 * named(made, "what trains"), rel=1e-3)


# Bytes of a page of 64 tokens in a 7B: 28 layers, keys and values of 4 heads of 128 in 2 bytes.
PAGE = 64 * 57344


@pytest.mark.slow
def test_the_cache_is_planned_by_concurrent_rows_and_its_bounds():
    # 511 tokens are 8 pages, a prompt without its last token 4; one page is scratch.
    assert named(memory.plan(BENCH), "keys") == (64 * 8 + 8 * 4 + 1) * PAGE
    some = plan_of(rollout={"max_concurrent": 16})
    assert named(some, "keys") == (16 * 8 + 8 * 4 + 1) * PAGE
    fixed = changed(BENCH, rollout={"kv_cache_tokens": 2048})
    assert named(memory.plan(fixed, limit=80 * GB), "keys") == (2048 // 64 + 2) * PAGE
    always = memory.plan(BENCH).size("always")
    tight = memory.plan(BENCH, limit=always + GB)
    left = 0.9 * (GB - named(tight, "scores") - named(tight, "prefill"))
    assert left * 7 / 8 < named(tight, "keys") < left + 3 * PAGE
    assert tight.size("rollout") < GB
    tighter = memory.plan(BENCH, limit=always)
    assert named(tighter, "keys") == (8 + 2) * PAGE  # one row


def test_absent_slots_are_as_many_as_the_cache_is_expected_to_hold():
    """Rows need a quarter of their limit, which is five pages of eight."""
    rows = dataclasses.replace(BENCH, max_steps=8)
    rows = changed(rows, rollout={"generation_batch_size": 512})
    free = memory.plan(rows)
    # 8 pages a row, 4 a prompt of eight rows, one of scratch.
    assert named(free, "keys") == (512 * 8 + 64 * 4 + 1) * PAGE
    tight = memory.plan(rows, limit=free.size("always") + 12 * GB)
    slots = named(tight, "scores") // (4 * 152_064 * 4)
    assert slots % 32 == 0 and 128 <= slots < 512
    assert (slots * 5 + 4 + 1) * PAGE <= named(tight, "keys") < ((slots + 32) * 5 + 4 + 1) * PAGE
    assert tight.size("rollout") <= 12 * GB
    # On a card with fused layers 192 rows would be sampled more slowly than 128 at a time.
    rows = dataclasses.replace(BENCH, max_steps=3)
    rows = changed(rows, rollout={"generation_batch_size": 192})
    for device, slots in ((None, 192), (runtime.H200, 128)):
        scores = named(memory.plan(rows, limit=80 * GB, device=device), "scores")
        assert scores == slots * 4 * 152_064 * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", [{"max_concurrent": 5}, {}, {"kv_cache_tokens": 100}, {"num_generations": 2}]
)
def test_the_cache_is_planned_as_the_engine_makes_it(monkeypatch, fields):
    """Either only fields bound it, or the device does."""
    monkeypatch.setattr(kv_cache, "PAGE_SIZE", 32)  # a CPU's
    pools = []
    make = kv_cache.pool
    monkeypatch.setattr(kv_cache, "pool", lambda *args: pools.append(make(*args)) or pools[-1])
    cfg = dataclasses.replace(QUICKSTART, eval=None)
    sizes = {"generation_batch_size": 8, "num_generations": 4, "max_completion_length": 3}
    batches = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    cfg = changed(cfg, rollout=sizes | fields, optim=batches)
    model, frozen, tokenizer = load_base(cfg.model, cfg.lora)
    params, frozen = trainable(model, frozen, jax.random.key(0))
    prompts, longest = cfg.prompts_per_rollout, cfg.data.max_prompt_length
    free = memory.plan(cfg)
    half = sum(named(free, name) for name in ("scores", "prefill")) + named(free, "keys") // 2
    for limit in (None, free.size("always") + half):
        stats = limit and {"bytes_limit": limit, "bytes_in_use": free.size("always")}
        monkeypatch.setattr(runtime, "memory_stats", lambda stats=stats: stats)
        sampler = rollouts.make_sampler(model, tokenizer, cfg.rollout, max_prompt_length=longest)
        keys = np.zeros((cfg.rollout.num_generations, 2), np.uint32)
        prompt = QueuedPrompt(np.ones(longest, np.int32), keys, sampler.params.max_tokens)
        variables = {"params": params, "frozen": frozen}
        limits = {"max_prompt_length": longest, "max_concurrent": cfg.rollout.max_concurrent}
        completions = sampler.engine.completions(variables, [prompt] * prompts, 1.0, **limits)
        assert len(list(completions)) == cfg.generation_batch_size
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(pools.pop()))
        assert named(memory.plan(cfg, limit=limit), "keys") == held


def test_scheduled_evaluation_is_planned_and_bounded_as_rollouts_are():
    evaluation = config.EvalConfig(num_generations=2, num_problems=200)
    evaluated = dataclasses.replace(BENCH, eval=evaluation)
    made = memory.plan(evaluated)
    (cache,) = (i for i in made.items if i.phase == "evaluation" and i.name == "keys and values")
    assert cache.size == (400 * 8 + 200 * 4 + 1) * PAGE
    assert made.peak == made.size("always", "evaluation")
    fewer = plan_of(evaluated, rollout={"max_concurrent": 64})
    assert fewer.size("evaluation") < made.size("evaluation") / 4
    require(made, made.peak)
    with pytest.raises(ConfigError, match="in its evaluation"):
        require(made, made.peak - 1)


def short_rows(length, rows, **sections):
    """Returns a config of rollouts of so many rows, with prompts of 16 tokens and completions of this length."""
    rollout = {"num_generations": 4, "max_completion_length": length, "generation_batch_size": rows}
    sections |= {"lora": {"rank": 2}, "data": {"max_prompt_length": 16}, "rollout": rollout}
    return changed(BENCH, **sections)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["layer", "mlp", "products", "none"])
def test_activations_grow_with_tokens_as_the_compilers_do(remat):
    """In float32 on a CPU, where attention keeps its scores, the slopes agree within a third."""
    model = {"weights": "float32", "dtype": "float32", "gradient_checkpointing": remat}
    budgets = ({"max_tokens_per_microbatch": tokens} for tokens in (320, 1280))
    configs = (short_rows(16, 128, model=model, optim=budget) for budget in budgets)
    small, large = (memory.plan(cfg, WIDE) for cfg in configs)
    planned = large.size("update") - small.size("update")
    of_small, of_large = (memory.compiled_update(x).temp_size_in_bytes for x in (small, large))
    assert planned == pytest.approx(of_large - of_small, rel=1 / 3)


SCORES = "scores of attention"
T4, A100 = cards.named("T4").device, cards.named("A100").device


def test_scores_are_planned_for_a_card_without_cudnns_attention():
    cfg = changed(BENCH, optim={"max_tokens_per_microbatch": 1024})
    most = max(sum(n * width**2 for n, width in s.arrays) for s in memory.update_shapes(cfg))
    old, new = (memory.plan(cfg, device=device) for device in (T4, A100))
    # Two float32 for each of 28 heads.
    assert named(old, SCORES) == 8 * 28 * most > 10**8
    assert not all_named(new, SCORES) and new == memory.plan(cfg)
    # cuDNN computes in 16 bits only.
    wide = memory.plan(changed(cfg, model={"dtype": "float32"}), device=A100)
    assert named(wide, SCORES) == named(old, SCORES)
    with runtime.on(T4, "reference"):
        assert named(memory.plan(cfg), SCORES) == named(old, SCORES)
    # Micro-batches are smaller where scores would not fit.
    plans = (memory.plan(GSM8K, limit=30 * GB, device=device) for device in (T4, A100))
    old, new = (plan.cfg.optim.max_tokens_per_microbatch for plan in plans)
    assert old < new


@pytest.mark.slow
def test_scores_are_as_large_as_the_compilers():
    """On a CPU the compiler takes three float32 for a score; for a T4 it takes two, which is planned."""
    arch = dataclasses.replace(WIDE, ffn_width=128, num_layers=2, num_heads=8)
    model = {"weights": "bfloat16", "gradient_checkpointing": "layer"}
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    optim = {"max_tokens_per_microbatch": 1024} | batches
    cfg = short_rows(240, 16, model=model, optim=optim)
    planned = memory.plan(cfg, arch, device=T4)
    rest = planned.size("update") - named(planned, SCORES)
    real = memory.compiled_update(memory.plan(cfg, arch)).temp_size_in_bytes - rest
    assert real == pytest.approx(named(planned, SCORES) * 3 / 2, rel=0.1)


def test_full_training_holds_its_weights_in_float32_and_for_sampling_in_16_bits():
    made = memory.plan(FULL)
    # 36 layers of the 3B shape: 2.77e9 values; gradients are there twice, AdamW's moments too.
    assert named(made, "what trains") == pytest.approx(2.77e9 * 4, rel=1e-2)
    # For rollouts, and for the evaluation that this run has.
    copies = all_named(made, "weights as sampled")
    assert [item.phase for item in copies] == ["rollout", "evaluation"]
    assert {item.size for item in copies} == {named(made, "what trains") // 2}
    assert named(made, "base: linears") == 0


@pytest.mark.slow
def test_the_cache_is_what_weights_as_sampled_leave():
    rows = {"max_concurrent": 256, "generation_batch_size": 256}
    model = {"trainable": "full", "weights": "bfloat16"}
    optim = {"optimizer": "adamw_8bit", "max_tokens_per_microbatch": 4608}
    cfg = changed(BENCH, model=model, optim=optim, rollout={"max_completion_length": 4096} | rows)
    free = memory.plan(cfg)
    needed = free.size("always", "update")
    assert free.peak > needed + GB
    for limit in range(needed, free.peak, GB):
        memory.plan(cfg, limit=limit).require()


def test_a_token_budget_bounds_the_micro_batch_and_bnpos_is_bounded_by_its_rows():
    of_token = 28 * 3584 * 2
    for budget in (4096, 1024):
        made = plan_of(optim={"max_tokens_per_microbatch": budget})
        assert named(made, "inputs of") == budget * of_token
    made = plan_of(grpo={"loss_type": "bnpo"})
    assert made.cfg.optim.max_tokens_per_microbatch is None
    # A prompt with its eight rows.
    assert named(made, "inputs of") == (256 + 8 * 256) * of_token


def test_the_plan_takes_the_fastest_recomputation_that_leaves_a_fifth():
    peaks = []
    for remat in ("products", "mlp", "layer"):
        made = plan_of(model={"gradient_checkpointing": remat})
        peaks.append(made.size("always", "update"))
        # Just enough for this one.
        chosen = memory.plan(BENCH, limit=int(peaks[-1] / 0.8) + 1).cfg
        assert chosen.model.gradient_checkpointing == remat
        assert chosen.optim.max_tokens_per_microbatch == 8192
    assert peaks == sorted(peaks, reverse=True)


def test_micro_batches_shrink_where_no_recomputation_helps_and_never_below_a_row():
    layer = plan_of(GSM8K, model={"gradient_checkpointing": "layer"})
    tight = memory.plan(GSM8K, limit=int(layer.size("always", "update") / 0.8) - 10**8).cfg
    assert tight.optim.max_tokens_per_microbatch == 4352
    # Too small for anything: what takes the least, for the error to be about.
    least = memory.plan(GSM8K, limit=GB).cfg
    assert least.optim.max_tokens_per_microbatch == 256 + 4096
    assert least.model.gradient_checkpointing == "layer"


@pytest.mark.parametrize("limit", [None, 20 * GB, 80 * GB])
def test_what_a_config_says_the_plan_leaves(limit):
    tokens = {"max_tokens_per_microbatch": 1000}
    cfg = changed(BENCH, model={"gradient_checkpointing": "mlp"}, optim=tokens)
    assert memory.plan(cfg, limit=limit).cfg == cfg


def test_without_a_report_of_memory_the_plan_is_careful():
    made = planned(BENCH)
    assert made.cfg.model.gradient_checkpointing == "layer"
    assert made.items == memory.plan(made.cfg).items


def test_the_plan_says_how_the_update_computes():
    lines = memory.plan(GSM8K, limit=24 * GB).lines()
    last = max(i for i, line in enumerate(lines) if line.startswith("update"))
    assert lines[last] == (
        "update      micro-batches of 8704 tokens (by the plan) in at most 3 shapes; "
        "gradient_checkpointing mlp (auto)"
    )
    optim = {"max_tokens_per_microbatch": 4096}
    line = plan_of(model={"gradient_checkpointing": "mlp"}, optim=optim).about_update
    assert "of 4096 tokens in at most" in line and line.endswith("gradient_checkpointing mlp")


LONG = {"rollout": {"max_completion_length": 4096}}
LONG |= {"optim": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 64}}
WIDE_LORA = {"lora": {"rank": 8192}, "optim": {"optimizer": "adamw_8bit"}}
NO_REMAT = {"model": {"gradient_checkpointing": "none"}}
ADAMW_8BIT = 'change optim.optimizer to "adamw_8bit" (optimizer 5.17 GB)'
FEWER_TOKENS = "optim.max_tokens_per_microbatch, which may go down to 512, from"


@pytest.mark.parametrize(
    ("changes", "limit", "advice"),
    [
        ({"model": {"weights": "bfloat16"}}, 14e9, 'change model.weights to "nvfp4"'),
        (LONG, 20e9, "change rollout.kv_cache_tokens"),
        ({"optim": {"max_tokens_per_microbatch": 18432}}, 12e9, f"change {FEWER_TOKENS} 18432"),
        (NO_REMAT, 14e9, 'change model.gradient_checkpointing to "layer"'),
        ({"lora": {"rank": 256}}, 18e9, ADAMW_8BIT),
        # The optimizer saves less than is missing.
        ({"lora": {"rank": 256}}, 16.5e9, f"{ADAMW_8BIT} and {FEWER_TOKENS} 8192 (workspace of "
         "a layer, or of the head 2.68 GB; inputs of the layers 1.64 GB)"),
        (WIDE_LORA, 80e9, "gradients, summed and new 165.36 GB). What would help: a lower "
         "lora.rank, a smaller model, or a larger card"),
    ],
)  # fmt: skip
def test_a_plan_that_cannot_fit_is_refused_with_the_field_to_change(changes, limit, advice):
    with pytest.raises(ConfigError, match="memory: this run needs") as error:
        require(memory.plan(changed(BENCH, **changes)), limit)
    assert advice in str(error.value)


def test_a_cache_without_room_for_a_row_is_refused_before_anything_runs():
    small, enough = (changed(BENCH, rollout={"kv_cache_fraction": x}) for x in (0.0002, 0.02))
    message = r"kv_cache_fraction: got 0.0002; .* space for 240 tokens; .* need 511"
    with pytest.raises(ConfigError, match=message):
        memory.plan(small, limit=80 * GB).require()
    memory.plan(enough, limit=80 * GB).require()


@pytest.mark.slow
@pytest.mark.parametrize(("spare", "is_short"), [(1.08, True), (1.3, False)])
def test_the_engine_leaves_a_tenth_of_what_is_free(spare, is_short):
    """A row that would fit into all of it may not fit into the cache."""
    cfg = changed(BENCH, rollout={"max_concurrent": 1, "max_completion_length": 8192})
    large = memory.plan(cfg, limit=80 * GB)
    beside = large.size("always") + named(large, "scores") + named(large, "prefill")
    made = memory.plan(cfg, limit=int(beside + spare * named(large, "keys")))
    (cache,) = all_named(made, "keys and values")
    assert bool(cache.shortage) == is_short


@pytest.mark.parametrize("name", ["qwen2.5-32b", "qwen2.5-72b"])
def test_the_large_shapes_fit_a_card_of_80_gb(name):
    rollout = {"num_generations": 4, "max_completion_length": 1024}
    optim = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    sections = {"model": {"model_name_or_path": name}, "lora": {"rank": 16}, "rollout": rollout}
    require(plan_of(**sections, optim=optim), 78 * GB)


def test_a_published_name_needs_no_files():
    by_name = plan_of(model={"model_name_or_path": "Qwen/Qwen2.5-7B-Instruct"})
    assert by_name.items == memory.plan(BENCH, architecture.KNOWN["qwen2.5-7b"]).items


def test_a_card_that_no_setting_is_enough_for_is_told_what_needs_more_and_what_would_help():
    """The 32B recipe on 24 GB: base, adapter and gradients alone need more."""
    cfg = config.load(CONFIGS / "gsm8k_qwen2.5_32b.toml")
    message = (
        "the device offers 24.00 GB: no setting saves enough, because at least 24.44 GB are needed "
        "(base: linears, norms, biases 17.56 GB; base: embedding, head 3.11 GB; what trains 1.07 GB; optimizer "
        "0.55 GB; gradients, summed and new 2.15 GB). What would help: a lower lora.rank, a smaller model, a larger "
        "card, or several cards that share the base (mesh.fsdp, mesh.tensor)"
    )
    with pytest.raises(ConfigError, match=f"{re.escape(message)}$"):
        memory.plan(cfg, limit=24 * GB).require()
    least = {"lora": {"rank": 8}, "rollout": {"max_completion_length": 256}}
    memory.plan(changed(cfg, **least, optim={"optimizer": "adamw_8bit"}), limit=24 * GB).require()


def test_a_plan_that_two_phases_exceed_is_told_the_fields_of_both():
    made = of_items(
        memory.Item("base", 10 * GB, "always"),
        memory.Item("cache", 75 * GB, "rollout", "rollout.kv_cache_tokens"),
        memory.Item("workspace", 80 * GB, "update", "optim.max_tokens_per_microbatch"),
    )
    first = r"change optim.max_tokens_per_microbatch \(workspace 80.00 GB\)"
    both = rf"{first} and rollout.kv_cache_tokens \(cache 75.00 GB\)"
    for limit, fields in ((87, first), (80, both)):
        with pytest.raises(ConfigError, match=f"{fields}$"):
            require(made, limit * GB)


def test_what_settings_save_is_what_they_save():
    """The sizes that a change of optimizer, or of the base's weights, is said to leave."""
    dense = plan_of(model={"weights": "bfloat16"})
    best = plan_of(model={"weights": "nvfp4"}, optim={"optimizer": "adamw_8bit"})
    for name in ("base: linears, norms, biases", "optimizer"):
        (item,) = all_named(dense, name)
        assert item.required == pytest.approx(named(best, name), rel=0.001)
        assert item.saved > item.size / 2


def test_a_base_that_trains_is_not_told_to_be_packed():
    full = planned(FULL)
    assert not [item for item in full.items if "model.weights" in item.field]
    with pytest.raises(ConfigError, match="What would help: a smaller model, or a larger card$"):
        require(full, 24 * GB)


def test_a_second_base_is_found_out():
    made = planned(BENCH)
    steady, base = made.size("always"), named(made, "base: linears")
    made.require_one_base(steady + base // 3, made.peak + base // 3)
    with pytest.raises(RuntimeError, match=r"after a step.* another copy of the base \(3\.\d+ GB"):
        made.require_one_base(steady + base, made.peak)
    with pytest.raises(RuntimeError, match="at the peak"):
        made.require_one_base(steady, made.peak + base)
    # Where the base trains there is none to copy.
    full = planned(FULL)
    full.require_one_base(full.size("always") * 2, full.peak * 2)


def test_the_trainer_compares_after_its_first_step_and_checks_when_all_is_compiled(monkeypatch):
    made = planned(BENCH, limit=80 * GB)
    stats = {"peak_bytes_in_use": made.peak, "bytes_in_use": made.size("always")}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    noted, early = [], types.SimpleNamespace(counts=(3, 3))

    def compare(earlier_peak, *, steps=1):
        check = guards.MemoryCheck(made, early, earlier_peak)
        for _ in range(steps):
            check(noted.append)

    compare(0, steps=2)
    assert sum("(+0%)" in line for line in noted) == 1 and "measured" in noted[-2]
    stats["peak_bytes_in_use"] *= 2
    compare(stats["peak_bytes_in_use"])
    with pytest.raises(RuntimeError, match="at the peak"):
        compare(0)
    early.counts = (2, 3)  # XLA times products, in memory of its own
    stats["bytes_in_use"] += named(made, "base: linears")
    compare(0, steps=2)
    check = guards.MemoryCheck(made, early, earlier_peak=0)
    check(noted.append)
    early.counts = (3, 3)
    with pytest.raises(RuntimeError, match="after a step"):
        check(noted.append)
    stats["bytes_in_use"] = made.size("always")
    check = guards.MemoryCheck(made, early := types.SimpleNamespace(counts=(2, 3)), earlier_peak=0)
    check(noted.append)
    early.counts = (3, 3)
    check(noted.append)  # the peak tells nothing
    # The table ends with the comparison.
    items = memory.Item("base", 8 * GB, "always"), memory.Item("x", GB, "update")
    *_, peak, measured, device = of_items(*items).lines(measured=9_900_000_000)
    assert "9.00 GB" in peak and "9.90 GB (+10%)" in measured and "80.00 GB" in device


def test_sizes_are_read_and_what_is_none_is_an_error():
    texts = ("80GB", "80000000000", "24 Gb", ".5KB", "1.5 GiB", "80gib", "2MiB")
    sizes = [80e9, 80e9, 24e9, 500, 1.5 * 2**30, 80 * 2**30, 2**21]
    assert [memory.parse_size(text) for text in texts] == sizes
    for text in ("", "80 gigs", "-1GB", "GB", "1.2.3GB", "80", "80G"):
        with pytest.raises(ValueError, match="device-memory: got"):
            memory.parse_size(text)


def test_the_command_prints_the_table_and_refuses_with_one_line(capsys):
    path = str(BENCH_7B)
    assert main.main(["plan", path, "--device-memory", "80"]) == 2
    assert "device-memory: got '80'; must be" in (error := capsys.readouterr().err)
    assert error.endswith("for gigabytes write 80GB\n")
    assert main.main(["plan", path, "--device-memory", "80GB", "--lora.rank", "16"]) == 0
    *_, peak, device, left = capsys.readouterr().out.splitlines()
    assert peak.startswith("peak ") and device.endswith(" 80.00 GB")
    assert left == f"it fits     {80 - float(peak.split()[-2]):.2f} GB are left"
    assert main.main(["plan", path, "--device-memory", "8GB"]) == 2
    out, error = capsys.readouterr()
    assert "keys and values" in out and "it fits" not in out
    assert error.startswith("qerl plan: memory: this run needs") and error.count("\n") == 1
    assert main.main(["plan"]) == 2
    assert "missing the config file: qerl plan CONFIG.toml" in capsys.readouterr().err
    assert main.main(["plan", path, "--eval.num-problems", "3"]) == 0
    out = capsys.readouterr().out
    assert "evaluation" in out and out.splitlines()[-1].startswith("fits?  ")


def test_noise_of_each_rows_own_is_planned():
    # Of 64 rows, two norms of 28 layers of 3584 numbers, with the bits that they are made of.
    size = 64 * 2 * 28 * 3584 * 8
    for per, sizes in (("group", [size]), ("sequence", [size]), ("rollout", [])):
        made = plan_of(GSM8K, noise={"per": per}, rollout={"max_concurrent": 64})
        assert [item.size for item in all_named(made, "noise of")] == sizes


def test_each_of_several_devices_holds_the_base_and_its_share_of_the_rows():
    alone, made = (plan_of(mesh={"data": count}) for count in (1, 3))
    assert made.size("always") == alone.size("always")
    assert made.size("update") == alone.size("update")
    rows = BENCH.generation_batch_size
    assert sum(made.rows) == rows and max(made.rows) == -(-rows // 3)
    assert named(made, "scores") < named(alone, "scores")
    last = made.lines()[-1]
    assert last.startswith(f"device 2    data 2, {made.rows[2]} rows of a rollout")
    assert not [line for line in alone.lines() if line.startswith("device 0")]
    with pytest.raises(ConfigError, match="each of 3 devices offers 1.00 GB"):
        require(made, GB)


def test_of_a_base_that_devices_share_each_holds_its_part():
    alone, shared = (plan_of(mesh=mesh) for mesh in ({"data": 1}, {"data": 2, "fsdp": 4}))
    linears = "base: linears"
    # Norms, biases and global scales stay whole.
    assert 0 < named(shared, linears) - named(alone, linears) / 4 < named(alone, linears) / 100
    assert named(shared, "base: embedding") == named(alone, "base: embedding")
    gathered = all_named(shared, "gathered")
    assert {item.phase for item in gathered} >= {"rollout", "update"}
    assert gathered[0].size == pytest.approx(named(alone, linears) * 2 / 28, rel=1e-6)
    assert len(shared.rows) == 2
    assert memory.plan(shared.cfg, device=A100).items == shared.items
    last = shared.lines()[-1]
    assert last.startswith(f"device 7    data 1, fsdp 3, {shared.rows[1]} rows of a rollout")


@pytest.mark.slow
def test_of_devices_that_decode_rows_together_each_holds_its_heads_and_their_cache():
    alone, made = (plan_of(mesh={"data": 2, "tensor": count}) for count in (1, 2))
    linears = "base: linears"
    assert 0 < named(made, linears) - named(alone, linears) / 2 < named(alone, linears) / 100
    assert named(made, "keys and values") == named(alone, "keys and values") / 2
    assert {item.phase for item in all_named(made, "gathered")} == {"update"}
    last = made.lines()[-1]
    assert last.startswith(f"device 3    data 1, tensor 1, {made.rows[1]} rows of a rollout")
    with pytest.raises(
        ConfigError, match="4 devices offers 4.00 GB: .*more cards that share the b"
    ):
        require(made, 4 * GB)
    with pytest.raises(ConfigError, match=r"mesh.tensor: got 99; must not exceed the \d+ heads"):
        plan_of(mesh={"tensor": 99})
