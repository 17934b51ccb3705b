"""The cases of `scripts.check_device`: factors, impossible combinations of their values, and the config of a case.

A case gives each factor a value. The committed list, check_device_cases.jsonl, is a pairwise cover: each possible pair
of values of two factors is in at least one case. So an error that needs two values together is found. The source of the
base and the stage after training are only paired with factors that can affect them (`are_paired`): each case has at
most one such stage besides its training, because most of its time is compilation. The list also has the shapes that a
Hopper GPU runs with its own kernels (`kernels`): fused decoding with all numbers of rows, and bfloat16 attention with
all groups and heads. `cover` makes the list. Nothing here needs JAX.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from qerl_jax.config import PackedFormat, Weights

type Case = dict[str, Any]
type Pair = tuple[tuple[str, Any], tuple[str, Any]]

FILE = pathlib.Path(__file__).with_suffix(".jsonl")

PACKED = get_args(PackedFormat)
_MERGED = ("merged_original", "merged_packed")
_EVALUATIONS = ("eval_at_ends", "eval_scheduled", "eval")
QUANTIZED = ("rtn", "awq", "gptq")
EXPORTS = ("peft", *_MERGED, "nvfp4_original", "nvfp4_packed")

# The first value of a factor is the default of a config. A case's name leaves it out.
FACTORS: dict[str, tuple[Any, ...]] = {
    "weights": get_args(Weights),
    "dtype": ("bfloat16", "float32"),
    "family": ("qwen2", "qwen3", "llama", "mistral", "smollm2"),
    "group": (1, 3, 4, 7, 8, 16),  # query heads per key head
    "head": (64, 80, 96, 128, 256),
    "rows": (1, 7, 8, 9, 32, 33, 128, 129, 192, 256, 512),  # rows sampled at once
    # A folder in 16 or 32 bits; a random base; or that folder quantized by `qerl quantize`.
    "source": ("folder", "random", "rtn", "awq", "gptq"),
    "trains": ("adapter", "adapter+norms", "full"),
    "rank": (32, 8, 80),
    # All linears; some; or different ranks and alphas, with rank-stabilized scaling.
    "branches": ("all", "some", "patterns"),
    "noise": ("off", "rollout", "both", "rollout+last"),
    "per": ("rollout", "group", "sequence", "token"),  # what gets its own noise
    "reference": ("none", "base", "copy"),
    "updates": ("one", "passes", "batches", "both"),  # optimizer steps of each rollout
    "remat": ("layer", "mlp", "products", "none"),
    "share_prompts": (True, False),
    "optimizer": ("adamw", "adamw_8bit"),
    "cut": ("plan", "tokens"),  # how micro-batches are cut
    "dynamic": (False, True),
    "loss": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
    "ratio": ("token", "sequence"),
    "entropy": ("off", "bonus", "adaptive", "quantile"),
    "old": ("behaviour", "recompute", "corrected"),
    # Bounds or masks of ratios, wide enough that the adapter still moves.
    "bounds": ("usual", "off", "icepop", "tokens", "sequences", "means", "off_policy"),
    "draw": ("plain", "top_k", "top_p", "min_p", "penalty", "all"),
    "ending": ("eos", "stop", "ignore_eos"),
    "cache": ("ample", "tokens", "fraction"),
    "compact": (True, False),
    "drafts": ("off", "always"),  # completions are too short for "auto" to make some
    "leaves": (
        "none",
        "carry",
        "share",
    ),  # a rollout waits for its last rows; they go on; they are truncated
    # Longest completion: shorter than a chunk and a cache page, or several of both.
    "tokens": (8, 72),
    "rewards": ("ids", "stock", "each"),  # one; several; several, each normalized separately
    # What a policy may call. Every turn that ends with a text of `STOPS` is a call.
    "tools": ("none", "function", "environment"),
    # The stage beside training: evaluations during it, an export of its result, or another command.
    "then": (
        *("none", *_EVALUATIONS, *EXPORTS),
        *("generate", "filter", "replay", "resume", "continue"),
    ),
}
_ALWAYS_SHOWN = ("weights", "dtype", "family", "group", "head", "rows")

GENERATIONS = 4
# With these the prompts of all rollouts are padded to one width, three quarters of the bound, because each width would
# be one more program to compile.
PROMPT, SEED = 56, 6

_BASE_WIDTHS = {  # D and F, the model's width and the MLP's
    "qwen2": (128, 384),
    "qwen3": (192, 512),
    "llama": (256, 448),
    "mistral": (320, 512),
    "smollm2": (576, 1536),
}
_VOCABULARIES = {"mistral": 520, "smollm2": 768}  # more rows than the tokenizer has ids
_TIED = ("qwen2", "qwen3", "smollm2")


# Combinations of values that cannot be in one case, with the reason. `a|b` is one of them, `!a|b` none of them.
_IMPOSSIBLE = """
weights=float32 dtype=bfloat16: weights in float32 need activations in float32
family=smollm2 group=!3: SmolLM2 has 3 queries per kv head
family=smollm2 head=!64: SmolLM2 has heads of 64
trains=full weights=!bfloat16|float32: packed weights have no gradient
trains=full rank=!32: without an adapter there is no rank
trains=full branches=!all: without an adapter there are no branches
loss=luspo ratio=token: LUSPO weighs ratios of whole sequences
dynamic=True rewards=each: the sum of rewards does not show whether each function gives equal rewards
trains=full reference=base: if the base is trained, the reference is a copy
trains=full then=peft|merged_original|merged_packed|nvfp4_packed: without an adapter there is only the trained model, in 16 bits, to pack
trains=full then=continue: there is no adapter to continue from
source=random then=peft|merged_original|merged_packed|nvfp4_original|nvfp4_packed: an export needs a base in a folder
source=random then=generate: `qerl generate` reads a base from a folder
source=rtn|awq|gptq then=merged_original|nvfp4_original: a packed folder has no original weights
source=folder weights=bfloat16|float32 then=merged_packed|nvfp4_packed: nothing is packed
draw=penalty|all old=behaviour: the sampler's log-probabilities do not have the penalty
noise=off per=!rollout: there is no noise
noise=both per=token: the trainer cannot draw noise of single tokens again
noise=both per=sequence share_prompts=True: the trainer computes a shared prompt once
bounds=icepop old=behaviour|recompute: IcePop is a correction of importance sampling
compact=False drafts=always: drafts need a batch that shrinks
cut=tokens loss=bnpo: bnpo's value depends on the micro-batches
cut=tokens ending=stop tokens=72: completions of many lengths make micro-batches of many shapes, and each is compiled
leaves=carry noise=both: updates have the noise of one rollout
leaves=carry per=!rollout: noise of a row would change between its tokens
leaves=carry old=!behaviour: only the sampler knows the probabilities of older policies
leaves=carry bounds=icepop: IcePop needs log-probabilities that are computed again
leaves=carry draw=penalty|all: so does the penalty
leaves=!none tools=!none: rows may wait for replies
leaves=!none tokens=8: all rows end in one chunk
leaves=share ending=ignore_eos: no row ends before the others
tools=!none ending=eos|ignore_eos: random weights seldom end a turn by themselves
tools=!none tokens=8: a call and its reply have more tokens
tools=!none cut=tokens: turns make completions of many lengths, too
tools=environment rows=128|129|192|256|512: each row has its own process
source=rtn|awq|gptq then=eval_at_ends|eval_scheduled|eval|filter|replay|resume|continue: a case has time for only one of them, and training does not depend on who packed the base
"""


def _rule(line: str) -> tuple[dict[str, tuple[Any, ...]], str]:
    """Parses a line of `_IMPOSSIBLE`: the values of each of its factors, and the reason."""
    parts, _, reason = line.partition(": ")
    values = {}
    for part in parts.split():
        name, _, texts = part.partition("=")
        chosen = [v for v in FACTORS[name] if str(v) in texts.removeprefix("!").split("|")]
        assert len(chosen) == texts.count("|") + 1, f"{part}: no such value"
        others = tuple(v for v in FACTORS[name] if v not in chosen)
        values[name] = others if texts.startswith("!") else tuple(chosen)
    return values, reason


_RULES = [_rule(line) for line in _IMPOSSIBLE.strip().splitlines()]


def impossible(case: Case) -> str | None:
    """The reason why the values of a case, or of a part of one, cannot be combined; None if they can."""
    for values, reason in _RULES:
        if all(case.get(name) in members for name, members in values.items()):
            return reason
    return None


# Factors that are stages of their own, and the factors that can affect those stages.
_STAGES = ("source", "then")
_OF_STAGES = ("weights", "dtype", "family", "trains", *_STAGES)


def are_paired(one: str, other: str) -> bool:
    """Whether all pairs of values of two factors are covered.

    A stage that quantizes a base, or reads a trained policy from files, does not depend on how it was trained.
    """
    return all(stage not in (one, other) or {one, other} <= {*_OF_STAGES} for stage in _STAGES)


def pairs(case: Case) -> Iterator[Pair]:
    """The pairs of values in a case that are covered. Factors are in their order."""
    values = [(name, case[name]) for name in FACTORS if name in case]
    both = itertools.combinations(values, 2)
    return ((one, other) for one, other in both if are_paired(one[0], other[0]))


def feasible_pairs() -> set[Pair]:
    """All pairs of values that should be covered and are possible."""
    return {
        ((one, a), (other, b))
        for one, other in itertools.combinations(FACTORS, 2)
        if are_paired(one, other)
        for a, b in itertools.product(FACTORS[one], FACTORS[other])
        if impossible({one: a, other: b}) is None
    }


def cover(tries: int = 12) -> list[Case]:
    """Makes a pairwise cover that includes all of `kernels`. The result is always the same.

    Each case starts from an entry of `kernels`, and later from a pair that is not covered yet. The other factors follow
    in random order. Each takes the value that covers the most new pairs with the factors before it. Of `tries` such
    cases the one that covers the most pairs is used.
    """
    rng, left, wanted = random.Random(0), feasible_pairs(), kernels()
    cases = []
    while left or wanted:
        starts = sorted(left, key=repr)
        first = wanted[0] if wanted else None
        candidates = [
            _filled(dict(first or starts[int(rng.random() * len(starts))]), left, rng)
            for _ in range(tries)
        ]
        best = max(candidates, key=lambda case: len(left.intersection(pairs(case))))
        gained = left.intersection(pairs(best))
        what = f"no case contains {first or starts[0]}: `impossible` must say why"
        assert best and (gained or first), what
        left -= gained
        wanted = [part for part in wanted if not part.items() <= best.items()]
        cases.append({"number": len(cases) + 1} | {name: best[name] for name in FACTORS})
    return cases


def kernels() -> list[Case]:
    """Parts of cases for the Hopper kernels, or just outside their shapes. Each must be in at least one case."""
    adapter = {"dtype": "bfloat16", "trains": "adapter", "source": "folder", "per": "rollout"}
    shapes = itertools.cycle(itertools.product(("qwen2", "qwen3", "llama", "mistral"), (64, 128)))
    rows = itertools.product(("nvfp4", "bfloat16"), FACTORS["rows"])
    decoding = [
        adapter | {"weights": weights, "rows": count, "family": family, "head": head}
        for (weights, count), (family, head) in zip(rows, shapes, strict=False)
    ]
    attention = [
        {"dtype": "bfloat16", "group": group, "head": head}
        for group, head in itertools.product(FACTORS["group"], FACTORS["head"])
    ]
    return decoding + attention


def is_fused(case: Case, *, has_portable: bool = False) -> bool:
    """Whether fused layers decode a case on a Hopper GPU: what they support, said once more and from the case alone.

    With the portable kernels installed these decode the other formats.
    """
    has_weights = has_portable or case["weights"] in ("nvfp4", "bfloat16")
    has_weights = has_weights and case["dtype"] == "bfloat16"
    has_one_noise = case["noise"] == "off" or case["per"] == "rollout"
    # Devices of mesh.tensor decode with their own parts; those of mesh.fsdp have no layer whole.
    is_held = case["trains"] != "full" and case.get("mesh", {}).get("fsdp", 1) == 1
    has_shape = case["rows"] <= 128 and case["head"] in (64, 128)
    return has_weights and has_one_noise and is_held and has_shape


def _filled(case: Case, left: set[Pair], rng: random.Random) -> Case:
    # Only random() is promised to give the same numbers in later Python versions.
    names = sorted((name for name in FACTORS if name not in case), key=lambda _: rng.random())
    order = list(FACTORS)
    for name in names:

        def gain(value: Any, name: str = name) -> int:
            new = (name, value)
            return sum(
                ((new, item) if order.index(name) < order.index(item[0]) else (item, new)) in left
                for item in case.items()
            )

        values = [v for v in FACTORS[name] if impossible(case | {name: v}) is None]
        if not values:  # a dead end covers nothing
            return {}
        values.sort(key=lambda _: rng.random())
        if name in _STAGES:  # avoid a stage unless it is needed
            values.sort(key=lambda value, name=name: value != FACTORS[name][0])
        case[name] = max(values, key=gain)
    return case


def text(cases: list[Case]) -> str:
    """The lines of the committed list."""
    return "".join(json.dumps(case) + "\n" for case in cases)


def read(path: pathlib.Path = FILE) -> list[Case]:
    """Reads the committed list."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def name(case: Case, *, full: bool = False) -> str:
    """The name of a case: its number and the values that are not default; with `full` all values."""
    shown = [
        f"{factor}={case[factor]}"
        for factor, values in FACTORS.items()
        if full or factor in _ALWAYS_SHOWN or case[factor] != values[0]
    ]
    shown += [f"mesh.{axis}={count}" for axis, count in case.get("mesh", {}).items()]
    return " ".join([f"{case['number']:03d}", *shown])


def meshes(count: int) -> list[dict[str, int]]:
    """The meshes of so many devices: replicas of one, and of several that share a base or decode rows together."""
    results = [{"data": count}]
    for group in range(2, count + 1):
        if count % group == 0:
            results += [{"data": count // group, axis: group} for axis in ("fsdp", "tensor")]
    return results


def fits(case: Case, mesh: dict[str, int]) -> bool:
    """Whether a case can run on a mesh."""
    if max(mesh.get("fsdp", 1), mesh.get("tensor", 1)) == 1:
        return True
    from pallas_kernels import FORMATS  # only here: it needs JAX

    block = FORMATS[packed_format(case)].tile("columns")
    enough = mesh.get("tensor", 1) <= architecture(case)["num_attention_heads"]
    divides = "tensor" not in mesh or (enough and case["head"] % block == 0)
    return divides and case["trains"] != "full" and case["remat"] != "none"


def cost(case: Case) -> float:
    """Rough relative time of a case: the number of programs that it compiles."""
    then = {"none": 0, "resume": 4, "replay": 2, "continue": 2, "eval": 4, "generate": 3}
    extra = then.get(case["then"], 2) + {"gptq": 1.0, "awq": 1.0, "rtn": 0.5}.get(case["source"], 0)
    extra += 0.5 * (case["reference"] != "none") + 0.5 * (case["old"] != "behaviour")
    extra += (case["ending"] == "stop") + (case["cut"] == "tokens") + (case["tokens"] > 8)
    # With up to 32 rows the layers of decoding are unrolled.
    return 6 + extra + (case["rows"] <= 32) + case["rows"] / 256


def smoke(listed: Sequence[Case], count: int = 12) -> list[Case]:
    """Chooses a few cheap cases. Each adds as many new values as possible on which kernels and files depend."""
    names = "weights dtype family group head trains source noise reference".split()
    chosen: list[Case] = []
    for _ in range(min(count, len(listed))):
        values = {(name, case[name]) for case in chosen for name in names}
        known = lambda case, values=values: sum((name, case[name]) in values for name in names)
        others = (case for case in listed if case not in chosen)
        chosen.append(min(others, key=lambda case, known=known: (known(case), cost(case))))
    return chosen


def architecture(case: Case) -> dict[str, Any]:
    """The config.json of a case's base: a small model of its family with two layers."""
    family, group, head = case["family"], case["group"], case["head"]
    width, ffn_width = _BASE_WIDTHS[family]
    # The fewest key heads that give 8 query heads or more and whole blocks of 64, as NVFP4 tiles need.
    is_enough = lambda count: count * group >= 8 and count * group * head % 64 == 0
    kv_heads = next(filter(is_enough, itertools.count(1)))
    heads = 9 if family == "smollm2" else kv_heads * group
    if case["source"] in ("awq", "gptq"):
        # Calibration reads the folder's tokenizer, and transformers then also reads config.json: there the width must
        # be divisible by the number of heads.
        width += -width % math.lcm(64, heads)
    table = {
        "model_type": {"smollm2": "llama"}.get(family, family),
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": ffn_width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": 3 if family == "smollm2" else kv_heads,
        "head_dim": head,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": family in _TIED,
        "vocab_size": _VOCABULARIES.get(family, 512),
        "torch_dtype": stored_dtype(case),
    }
    if family == "llama":
        table["rope_scaling"] = {
            **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        }
    return table


def stored_dtype(case: Case) -> str:
    """The dtype of the weights in a case's folder: "float32" or "bfloat16"."""
    return "float32" if case["weights"] == "float32" else "bfloat16"


def packed_format(case: Case) -> str:
    """The format to which `qerl quantize` packs a case's folder. A dense base unpacks it again."""
    return case["weights"] if case["weights"] in PACKED else "nvfp4"


def updates_per_rollout(case: Case) -> int:
    """Optimizer steps per rollout."""
    return {"one": 1, "passes": 2, "batches": 2, "both": 4}[case["updates"]]


def num_rollouts(case: Case) -> int:
    """Number of rollouts: two, because the first one starts without a trained adapter; three with noise.

    The first of the three stages of noise has sigma 0.
    """
    return 2 if case["noise"] == "off" else 3


def generation_batch(case: Case) -> int:
    """Completions of a rollout. Some wait if the rows sampled at once are not whole groups."""
    return -(-case["rows"] // 8) * 8


def run_config(case: Case, base: str, output_dir: str, *, reports_memory: bool) -> dict[str, Any]:
    """The TOML table of a case's training. On a device that does not report its memory tokens replace a fraction of it."""
    rows, updates = case["rows"], updates_per_rollout(case)
    batch, cuts = generation_batch(case), 2 if case["updates"] in ("batches", "both") else 1
    table: dict[str, Any] = {
        "output_dir": output_dir,
        "max_steps": num_rollouts(case) * updates,
        "seed": SEED,
        # Only at the end, unless the run is resumed.
        "save_steps": updates if case["then"] == "resume" else num_rollouts(case) * updates,
        "model": {
            "model_name_or_path": base,
            "tokenizer_name_or_path": "qerl-tiny",
            "weights": case["weights"],
            "dtype": case["dtype"],
            "random_base": case["source"] == "random",
            "gradient_checkpointing": case["remat"],
            "trainable": "full" if case["trains"] == "full" else "lora",
        },
        "mesh": (mesh := case.get("mesh", {})) | {"data": min(mesh.get("data", 1), batch)},
        "data": {"dataset": "arithmetic", "num_problems": 512, "max_prompt_length": PROMPT},
        "rewards": _rewards(case),
        "rollout": {
            "num_generations": GENERATIONS,
            "generation_batch_size": batch,
            "max_concurrent": rows,
            "max_completion_length": case["tokens"],
            "compact": case["compact"],
            "drafts": case["drafts"],
        },
        "grpo": {
            "loss_type": case["loss"],
            "importance_sampling_level": case["ratio"],
            "num_iterations": 2 if case["updates"] in ("passes", "both") else 1,
        },
        "optim": {
            # Large enough that norms in bfloat16 change.
            # At the adapter's rate a whole model would be certain of each token before noise is compared.
            "learning_rate": 5e-4 if case["trains"] == "full" else 2e-3,
            "lr_scheduler_type": "constant",
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "per_device_train_batch_size": batch // cuts // 2,
            "gradient_accumulation_steps": 2,
            "share_prompts": case["share_prompts"],
            "optimizer": case["optimizer"],
        },
    }
    rollout, objective = table["rollout"], table["grpo"]
    if case["trains"] != "full":
        rank, norms = case["rank"], case["trains"] == "adapter+norms"
        # The change after a few steps of Adam grows with alpha, whatever the rank.
        table["lora"] = {"rank": rank, "alpha": 32.0, "train_norms": norms}
        table["lora"] |= _BRANCHES[case["branches"]]
    if case["noise"] != "off":
        # Large compared to bfloat16 rounding, so that a check can see it.
        scope, _, last = case["noise"].partition("+")
        table["noise"] = {"sigma_start": 0.2, "sigma_end": 0.1, "num_stages": 3}
        table["noise"] |= {"scope": scope, "final_norm": bool(last), "per": case["per"]}
        table["noise"]["unit"] = "relative" if last else "absolute"
    if case["dynamic"]:
        objective["dynamic_sampling"] = {"max_rounds": 3}
    if case["reference"] != "none":
        objective["reference"] = {"beta": 0.02}
    if case["reference"] == "copy":
        objective["reference"] |= {"policy": "synced", "sync_steps": 1, "mixup_alpha": 0.5}
    objective |= _ENTROPIES[case["entropy"]]
    if case["loss"] == "cispo":  # an upper bound that ratios seldom meet
        objective["epsilon_high"] = 5.0
    if case["rewards"] == "each":
        objective["multi_objective_aggregation"] = "normalize_then_sum"
    if case["old"] == "recompute" and case["noise"].startswith("rollout"):
        table["noise"]["estimator"] = "published"
    elif case["old"] != "behaviour":
        objective["old_logprobs"] = "recompute"
    objective |= _BOUNDS[case["bounds"]]
    if case["old"] == "corrected":
        objective["mismatch"] = {"correction": {}} | objective.get("mismatch", {})
    if case["cut"] == "tokens":
        table["optim"]["max_tokens_per_microbatch"] = half_of(batch // cuts, case["tokens"])
    rollout |= draws(case) | _LEAVES[case["leaves"]]
    if case["ending"] == "stop":
        rollout["stop"] = list(STOPS)
    rollout["ignore_eos"] = case["ending"] == "ignore_eos"
    rollout |= cache_of(case, reports_memory)
    if case["tools"] != "none":
        table["tools"] = {"call_pattern": "(?s)(?P<argument>.+)", "max_reply_tokens": 4}
        table["tools"] |= {"max_tool_calling_iterations": 2, "workers": 4}
        table["tools"] |= _TOOLS[case["tools"]]
    if case["then"].startswith("eval_"):
        steps = updates if case["then"] == "eval_scheduled" else 0
        table["eval"] = {"num_problems": 6, "reward": EVEN_FIRST}
        table["eval"] |= {"eval_steps": steps, "num_generations": 2}
    return table


def half_of(rows: int, completion: int) -> int:
    """Tokens of a micro-batch, so that rows of full length make two of one shape."""
    prompts, rest = divmod(rows, 2 * GENERATIONS)
    rows, prompts = (GENERATIONS * prompts, prompts) if prompts else (rest // 2, 1)
    return prompts * PROMPT + rows * completion


def cache_of(case: Case, reports_memory: bool) -> dict[str, Any]:
    """The field of [rollout] that bounds the cache: memory for three quarters of the rows, which need whole pages."""
    if case["cache"] == "ample":
        return {}
    if case["cache"] == "fraction" and reports_memory:
        return {"kv_cache_fraction": 0.05}
    row = -(-(PROMPT + case["tokens"]) // 64) * 64
    return {"kv_cache_tokens": row * max(1, case["rows"] * 3 // 4)}


_LEAVES: dict[str, dict[str, Any]] = {
    "none": {},
    "carry": {"carry": 2},
    "share": {"stop_share": 0.75},
}
_ENTROPIES: dict[str, dict[str, Any]] = {
    "off": {},
    "bonus": {"entropy": {"coef": 1e-3}},
    "adaptive": {"entropy": {"adaptive": True, "target": 10.0}},
    "quantile": {"top_entropy_quantile": 0.5},
}
# The fields of [lora] that select linears, beside the rank.
_BRANCHES: dict[str, dict[str, Any]] = {
    "all": {},
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "patterns": {
        "rank_pattern": {"down_proj": 4, "layers.0.self_attn.o_proj": 16},
        "alpha_pattern": {"v_proj": 16.0},
        "use_rslora": True,
    },
}
_BOUNDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "off": {"delta": 0.0},
    "icepop": {"mismatch": {"correction": {"mode": "token_mask", "clip_min": 0.01}}},
    "tokens": {"mismatch": {"mask": {"level": "token", "ratio_max": 100.0}}},
    "sequences": {"mismatch": {"mask": {"level": "sequence", "ratio_max": 1e9}}},
    "means": {"mismatch": {"mask": {"level": "geometric", "ratio_max": 100.0}}},
    "off_policy": {"mismatch": {"off_policy_threshold": 10.0}},
}
# Texts that random weights produce within a few tokens, but not in every row: one row in 16 has one.
STOPS = ("m", "v")
_REWARDS = "scripts.check_device_cases"
EVEN_IDS, EVEN_FIRST, RARE, ALTERNATING = (
    f"{_REWARDS}:{name}" for name in ("even_ids", "even_first", "rare", "alternating")
)
_TOOLS = {
    "function": {"functions": [f"{_REWARDS}:count"]},
    "environment": {"environment": f"{_REWARDS}:Counting", "environment_options": {"most": 9}},
}


def _rewards(case: Case) -> dict[str, Any]:
    # Rewards by the share of even ids are all different; dynamic sampling needs groups with equal rewards.
    functions = [RARE if case["dynamic"] else EVEN_IDS]
    if case["rewards"] == "ids":
        return {"functions": functions}
    stock = ["correct_and_well_formed_reward", "get_math_verify_reward"]
    return {
        "functions": functions + stock,
        "weights": [1.0, 0.5, 0.5],
        "soft_punish_cache": 8,
        "options": {"get_math_verify_reward": {"workers": 1}},  # other cases start processes too
    }


def draws(case: Case) -> dict[str, Any]:
    """The sampling options of a case, by their names in `[rollout]`."""
    options = {"top_k": 20, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.2}
    drawn = {"penalty": "repetition_penalty"}.get(case["draw"], case["draw"])
    return {name: value for name, value in options.items() if drawn in (name, "all")}


# Rewards and tools, by import path. A child process at this step waits to be killed.
HOLD = "CHECK_DEVICE_HOLD_AT_STEP"


def even_ids(completion_ids, trainer_state=None, **_) -> list[float]:
    """Reward: the share of even ids. Random weights give different shares, and an adapter can learn it."""
    _hold(trainer_state)
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def even_first(completion_ids, **_) -> list[float]:
    """Reward: 1 if the first id is even."""
    return [float(len(ids) > 0 and ids[0] % 2 == 0) for ids in completion_ids]


def rare(completion_ids, trainer_state=None, **_) -> list[float]:
    """Reward: 1 in one of four. In most groups both rows get the same, but hardly ever in all groups of a run."""
    _hold(trainer_state)
    return [float(sum(ids) % 4 == 0) for ids in completion_ids]


def alternating(completion_ids, **_) -> list[float]:
    """Reward: 0 and 1 in turns, whatever was sampled."""
    return [float(row % 2) for row in range(len(completion_ids))]


def count(text: str) -> str:
    """Counts characters.

    Args:
        text: Any.

    Returns:
        Their number.
    """
    return str(len(text))


class Counting:
    """An environment that counts the calls of a row. Its reward is the count divided by the expected maximum."""

    def __init__(self, most: int):
        self.most, self.calls = most, 0

    def reset(self, **row) -> None:
        """Starts a row."""
        self.calls = 0

    def call(self, text: str) -> str:
        """Counts a call.

        Args:
            text: Any text.

        Returns:
            The number of calls so far.
        """
        self.calls += 1
        return str(self.calls)

    def get_reward(self) -> float:
        """The reward of the row."""
        return self.calls / self.most


def _hold(trainer_state) -> None:
    """Waits to be killed, in a child process that has reached its step."""
    at = os.environ.get(HOLD)
    if at is not None and trainer_state is not None and trainer_state.global_step >= int(at):
        time.sleep(3600)
