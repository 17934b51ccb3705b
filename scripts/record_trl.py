"""Records tests/golden/loss_trl: `python -m scripts.record_trl`.

Every number is computed by TRL's own code: losses and gradients by `GRPOTrainer._compute_loss`, and advantages by the
lines of `_generate_and_score_completions` that compute them from rewards. Only the model is replaced, by given
log-probabilities and entropies. It needs an interpreter with torch, and seconds on a CPU:

    pip install torch==2.13.0 transformers==5.23.0 trl==1.16.0
"""

from __future__ import annotations

import collections
import inspect
import itertools
import json
import pathlib
import textwrap
import types

GOLDEN = pathlib.Path(__file__).parents[1] / "tests/golden/loss_trl"
ROWS, LENGTH, LENGTHS = 8, 12, (12, 0, 1, 9, 5, 12, 7, 3)
# The options of every case unless it overrides them: TRL's defaults.
DEFAULTS = {
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "off_policy_mask_threshold": None,
    "importance_sampling_mode": None,
}
CLIP_MAX = 1.2


def cases() -> list[dict]:
    """The options of each case."""
    options = []
    for loss, beta in itertools.product(("cispo", "sapo", "luspo", "vespo"), (0.0, 0.04)):
        first = {"loss_type": loss, "beta": beta}
        if loss == "cispo":
            first["epsilon_high"] = 1.25
        if loss == "luspo":
            first["importance_sampling_level"] = "sequence"
        options.append(first)
        if beta:
            continue
        masks = {"off_policy_mask_threshold": 0.1, "importance_sampling_mode": "token_truncate"}
        options += [first | masks, first | {"importance_sampling_mode": "token_mask"}]
        if loss != "vespo":
            options.append(first | {"importance_sampling_mode": "sequence_truncate"})
        entropy = {"top_entropy_quantile": 0.3, "entropy_coef": 0.02}
        options += [first | {"top_entropy_quantile": 0.3}, first | entropy | {"beta": 0.04}]
    options += [
        {"loss_type": "cispo", "epsilon_high": 1.25, "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "sapo_temperature_pos": 3.0, "sapo_temperature_neg": 7.0},
        {"loss_type": "luspo"},
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 4.0},
    ]
    for loss in ("grpo", "dr_grpo", "bnpo", "dapo"):
        options += [
            {"loss_type": loss, "entropy_coef": 0.02, "beta": 0.04},
            {"loss_type": loss, "top_entropy_quantile": 0.3, "entropy_coef": 0.02},
            {"loss_type": loss, "top_entropy_quantile": 0.0},
        ]
    gspo = {"importance_sampling_level": "sequence"}
    for loss in ("grpo", "dr_grpo", "bnpo", "dapo"):
        first = {"loss_type": loss}
        options += [first, first | gspo | {"importance_sampling_mode": "sequence_mask"}]
    first = {"loss_type": "dapo"}
    options += [
        first | gspo,
        first | masks,
        first | {"importance_sampling_mode": "token_mask"},
        first | {"importance_sampling_mode": "sequence_truncate"},
        first | {"delta": 1.4},
        first | {"beta": 0.04, "use_bias_correction_kl": True},
    ]
    return options


def inputs(torch):
    """Rows of every length, one of them empty, with ratios on both sides of all bounds; float64."""
    generator = torch.Generator().manual_seed(27)
    normal = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    logps = -normal(ROWS, LENGTH).abs() - 0.05
    return {
        "logps": logps,
        # Their quantile is computed in float32.
        "entropies": normal(ROWS, LENGTH).abs().float().double(),
        "old_logps": logps + 0.3 * normal(ROWS, LENGTH),
        "ref_logps": logps + 0.3 * normal(ROWS, LENGTH),
        "behaviour_logps": logps + 0.3 * normal(ROWS, LENGTH),
        "advantages": normal(ROWS),
        "mask": (torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]).to(torch.int32),
    }


def trainer(trl, torch, options, leaves):
    """The attributes of a trainer that `_compute_loss` reads, with a model that returns the given values."""
    cls = trl.GRPOTrainer
    mine = {name: options[name] for name in DEFAULTS if name in options} | options
    self = types.SimpleNamespace(
        **mine,
        args=types.SimpleNamespace(
            **{"delta": None, "use_bias_correction_kl": False, "steps_per_generation": 1} | mine
        ),
        accelerator=types.SimpleNamespace(
            **{"num_processes": 1, "process_index": 0, "sync_gradients": True},
            device=torch.device("cpu"),
            **dict.fromkeys(("gather", "gather_for_metrics"), lambda x: x),
            **dict.fromkeys(("pad_across_processes", "reduce"), lambda x, **_: x),
        ),
        model=types.SimpleNamespace(training=True),
        epsilon_low=options["epsilon"],
        **{"max_completion_length": 32, "current_gradient_accumulation_steps": 1},
        **dict.fromkeys(("aux_loss_enabled", "use_adaptive_entropy"), False),
        _entropy_bonus_enabled=options["entropy_coef"] != 0,
        use_vllm=options["importance_sampling_mode"] is not None,
        vllm_importance_sampling_correction=options["importance_sampling_mode"] is not None,
        _metrics={"train": collections.defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (*leaves, None),
        get_off_policy_mask=cls.get_off_policy_mask,
        get_gamma_weights=cls.get_gamma_weights,
    )
    self.get_high_entropy_mask = types.MethodType(cls.get_high_entropy_mask, self)
    return self


def weights(torch, mode, x):
    """The ratios of `vllm_importance_sampling_mode`, which TRL computes before the loss."""
    difference = (x["old_logps"] - x["behaviour_logps"]) * x["mask"]
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, max=CLIP_MAX)
    return ratio.masked_fill(ratio > CLIP_MAX, 0.0)


def loss_of(trl, torch, case, x):
    """TRL's loss of a case, its gradients, and its metrics."""
    options = DEFAULTS | case
    leaves = [x[name].clone().requires_grad_() for name in ("logps", "entropies")]
    self = trainer(trl, torch, options, leaves)
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int32),
        "completion_ids": ids,
        "completion_mask": x["mask"],
        "advantages": x["advantages"],
        "old_per_token_logps": x["old_logps"],
        "ref_per_token_logps": x["ref_logps"],
        "sampling_per_token_logps": x["behaviour_logps"],
        "num_items_in_batch": x["mask"].sum(),
    }
    if options["importance_sampling_mode"]:
        batch["importance_sampling_ratio"] = weights(torch, options["importance_sampling_mode"], x)
    loss = trl.GRPOTrainer._compute_loss(self, self.model, batch)
    loss.backward()
    grads = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    metrics = {name: values[0] for name, values in self._metrics["train"].items()}
    return loss.item(), grads, metrics


def advantages_of(trl, torch, per_function, reward_weights, group):
    """The advantages that TRL's own lines compute from rewards [B, functions]."""
    source = inspect.getsource(trl.GRPOTrainer._generate_and_score_completions).splitlines()
    find = lambda text: next(i for i, line in enumerate(source) if text in line)
    lines = source[find("unscorable_mask =") : find("advantages = torch.nan_to_num") + 1]
    space = {
        "torch": torch,
        "nanstd": trl.nanstd,
        "device": "cpu",
        "num_generations": group,
        "rewards_per_func": per_function,
        "self": types.SimpleNamespace(
            multi_objective_aggregation="normalize_then_sum",
            reward_weights=reward_weights,
            reward_funcs=range(per_function.shape[1]),
        ),
    }
    exec(textwrap.dedent("\n".join(lines)), space)
    return space["advantages"]


def main() -> None:
    import torch
    from safetensors.torch import save_file
    from trl import __version__ as version
    from trl.trainer import grpo_trainer as trl

    # TRL makes tensors from its temperatures, in the default dtype.
    torch.set_default_dtype(torch.float64)
    x = inputs(torch)
    vectors, recorded = dict(x), []
    for number, case in enumerate(cases()):
        loss, (grad, entropy_grad), metrics = loss_of(trl, torch, case, x)
        vectors[f"{number}.grad"] = grad
        if case.get("entropy_coef"):
            vectors[f"{number}.entropy_grad"] = entropy_grad
        recorded.append({"options": case, "loss": loss, "metrics": metrics})
    nan = float("nan")
    normal = torch.randn(8, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    normal[:, 1] = (normal[:, 1] > 0).to(torch.float64)
    normal[4:, 2] = 0.5  # a function without a signal in one group
    abstained = normal.clone()
    abstained[1, 0] = abstained[6, 2] = nan
    abstained[3] = nan
    factors = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    vectors["weights"] = factors
    for name, rewards in (("rewards", normal), ("abstained", abstained)):
        vectors[name] = rewards
        vectors[f"{name}.advantages"] = advantages_of(trl, torch, rewards, factors, 4)
    GOLDEN.mkdir(parents=True, exist_ok=True)
    save_file(vectors, GOLDEN / "vectors.safetensors", {"trl": version})
    text = json.dumps({"trl": version, "clip_max": CLIP_MAX, "cases": recorded}, indent=1)
    (GOLDEN / "cases.json").write_text(text + "\n")
    print(f"{len(recorded)} cases of TRL {version} in {GOLDEN}")


if __name__ == "__main__":
    main()
