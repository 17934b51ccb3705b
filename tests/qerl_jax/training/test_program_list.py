"""Tests that a run compiles the programs of its list, early, and that there are few."""

import dataclasses
import re
import types
from collections import Counter
from unittest import mock

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.compilation import early_programs
from qerl_jax.compilation.program_process import ProgramProcess
from qerl_jax.model import architecture
from qerl_jax.planning import cards, memory
from qerl_jax.rl import rollouts, update
from qerl_jax.training import load, program_list
from qerl_jax.training.check import check
from qerl_jax.training.trainer import train
from tests.faults import harness
from tests.programs import compiled

# All passes that an update can have beside the gradient.
SCORED = {
    "reference": {"beta": 0.1, "policy": "synced", "sync_steps": 1, "mixup_alpha": 0.5},
    "old_logprobs": "recompute",
    "num_iterations": 2,
    "top_entropy_quantile": 0.5,
}
LARGE = {"decode", "prefill", "score", "accumulate", "apply", "_score_twice"}


def listed(name):
    """The list of a recipe on an H100, by the names of programs."""
    cfg, card = config.load(name), cards.named("H100")
    arch = architecture.known(cfg.model.model_name_or_path)
    plan = memory.plan(cfg, arch, limit=card.limit, device=card.device)
    model = memory.abstract_policy(cfg, arch)[0]
    # The shapes of the base follow from tracing its initialization, and cuDNN's attention cannot be traced without a GPU.
    without_cudnn = mock.patch.object(runtime, "has_cudnn_attention", lambda *_: False)
    with runtime.on(card.device), without_cudnn:
        tokenizer = types.SimpleNamespace(
            num_tokens=arch.vocab_size, stop_tokens=(1,), special_tokens={}
        )
        sampler = rollouts.make_sampler(
            *(model, tokenizer, dataclasses.replace(cfg.rollout, drafts=cfg.drafts)),
            max_prompt_length=cfg.data.max_prompt_length,
            prompts=cfg.prompts_per_rollout,
            free=plan.free,
        )
        updater = update.make_updater(plan.cfg, model, arch.vocab_size, total_steps=100)
        checked = types.SimpleNamespace(
            cfg=cfg,
            task=types.SimpleNamespace(model=model, tools=None),
            evaluator=None,
            resumed=None,
        )
        first, others = program_list.programs(checked, sampler.engine, updater)
    goes_on = ["prefill"] if cfg.rollout.carry else []
    begins = ["decode", "prefill", "accumulate", "apply", *goes_on, "check"]
    assert [program.name for program in first] == begins
    longest = [program.key[-1][1] for program in first if program.name == "prefill"]
    assert longest[0] >= cfg.data.max_prompt_length - 1
    assert (
        not cfg.rollout.carry
        or longest[1] >= cfg.data.max_prompt_length + cfg.rollout.max_completion_length - 2
    )
    return Counter(program.name for program in [*first, *others])


@pytest.mark.parametrize(
    ("name", "decode", "prefill"),
    [
        ("paper/gsm8k_qwen2.5_7b", 7, 4),
        ("gsm8k_qwen2.5_7b", 5, 4),
        ("gsm8k_qwen2.5_32b", 5, 4),
        ("paper/bigmath_qwen2.5_7b", 5, 4),
    ],
)
def test_a_recipe_has_few_programs(name, decode, prefill):
    """Two more decode programs are for sizes above 128."""
    counts = listed(name)
    assert counts["decode"] == decode and counts["prefill"] <= prefill
    assert counts["accumulate"] == 3 and counts["apply"] == counts["check"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("length", "carry", "grpo"),
    [(8, 0, {}), (100, 2, {}), (8, 0, SCORED)],
    ids=["plain", "carry", "scored"],
)
def test_a_run_calls_only_large_programs_that_it_lists_and_a_second_one_traces_none(
    length, carry, grpo, tmp_path, monkeypatch, caplog, capsys
):
    """A call with another shape or dtype would compile another program. Both runs learn the same as one without a list."""
    monkeypatch.setattr(early_programs, "workers", lambda: 2)
    seen, begin, make = {}, early_programs.EarlyPrograms.begin, ProgramProcess.make

    def watched(self, first, others):
        seen["names"] = Counter(p.name for p in [*first, *others])
        begin(self, first, others)

    def counted(self, request):
        seen["made"] += 1
        return make(self, request)

    monkeypatch.setattr(early_programs.EarlyPrograms, "begin", watched)
    monkeypatch.setattr(ProgramProcess, "make", counted)
    # Else a larger program may do the work of one that is not compiled yet, and rounds in another way.
    monkeypatch.setattr(early_programs.EarlyPrograms, "unready", frozenset())
    rows = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    sections = {"optim": rows, "grpo": grpo, "max_steps": 2 if not grpo else 4}
    sections["eval"] = {"num_problems": 12, "top_p": 0.9, "temperature": 1.0}
    sections["rollout"] = {"num_generations": 2, "max_completion_length": length, "carry": carry}
    adapters = []
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "cache"))
    compilation_cache.reset_cache()  # JAX goes on with the folder that a process used first
    jax.config.update("jax_log_compiles", True)  # in all threads
    try:
        for name in ("first", "second", "plain"):
            jax.clear_caches()  # of other runs in this process
            caplog.clear()
            seen |= {"made": 0, "names": Counter()}
            if name == "plain":
                monkeypatch.setattr(early_programs, "workers", lambda: 0)
            with caplog.at_level("WARNING", logger="jax"):
                train(harness.tiny(tmp_path / name, **sections), quiet=True)
            in_process = {
                match[1]
                for record in caplog.records
                if (match := re.match(r"Compiling (?:jit\()?(\w+)", record.message))
            }
            adapters.append(
                (tmp_path / name / "adapter" / "adapter_model.safetensors").read_bytes()
            )
            assert "compiled early" not in capsys.readouterr().err
            if name == "plain":
                assert LARGE <= in_process | {"score"} and not seen["names"]
            else:
                assert not LARGE & in_process
                names = seen["names"]
                assert names["decode"] == 2 + 1 and names["accumulate"] >= 2
                assert seen["made"] == (names.total() if name == "first" else 0)
    finally:
        jax.config.update("jax_log_compiles", False)
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()
    assert adapters[0] == adapters[1] == adapters[2]


@pytest.mark.slow
def test_what_trains_is_compiled_by_a_thread_and_its_state_is_one_program(tmp_path, caplog):
    checked = check(harness.tiny(tmp_path / "run"))
    names = compiled(caplog, lambda: load._policy(checked, quiet=True))
    assert names.count("first_state") == 1
    # A log of this thread's compilations: the adapter's is another's.
    assert {"init_params", "broadcast_in_dim", "stage"}.isdisjoint(names)
