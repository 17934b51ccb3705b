"""Estimates the device memory of a run from shapes and a few measured factors; no weights are allocated.

The peak is the memory that is always in use (base, adapter, optimizer) plus the largest of three phases that follow
each other: the rollout (KV cache, logits), the update (gradients, activations of one micro-batch) and scheduled
evaluation (KV cache, logits). A cache is released when its phase ends. The compiler decides the size of workspace;
its factors were taken from `compiled.memory_analysis()` of programs for an H200.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import runtime
from qerl_jax.checkpoint import hf_folder
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.config import DENSE, ConfigError, OptimConfig, Remat, RunConfig
from qerl_jax.distributed import sharding
from qerl_jax.distributed.mesh import places
from qerl_jax.generation import kv_capacity
from qerl_jax.generation.draft_control import Drafting
from qerl_jax.model import architecture, fused_decode, kv_cache, layers
from qerl_jax.model.division import Division
from qerl_jax.model.transformer import DenseLinears, Transformer, abstract_base, trainable
from qerl_jax.rl import experience, grpo, microbatches, optimizer, update
from qerl_jax.rl.objective import gradient
from qerl_jax.system.checked import require

Phase = Literal["always", "rollout", "update", "evaluation"]
_TURNS: tuple[Phase, ...] = ("rollout", "update", "evaluation")

# Workspace as numbers of arrays that exist at the same time. In the backward pass of a layer's MLP: _FFN arrays
# [tokens, F] (two fewer if matrix products are kept) and _WIDTH arrays [tokens, D]. In that of attention: _SLOTS
# arrays as large as queries, keys and values of all slots (these, the attention output, and the gradients of both).
# _KEPT_... are what a layer keeps per token if nothing is recomputed. _CHUNK counts float32 logits [rows, V] in a
# chunk of the head, gradients included.
_FFN, _WIDTH, _SLOTS = 8, 2, 4
_KEPT_FFN, _KEPT_WIDTH, _KEPT_INPUTS = 3, 3, 3
_CHUNK = 1.5
# Bytes of each attention score of a micro-batch in the backward pass of plain attention: two float32, taken from
# programs for a T4 (7.9 to 8.5). A CPU needs 12.
_SCORE = 8
# Share of the memory that the plan's own choices may use, because estimates of workspace are not exact.
_CHOSEN_SHARE = 0.8
_CHUNK_ROWS = 1024
# Bytes of a weight in NVFP4: four bits, and the eight bits of a scale that 16 weights share.
_PACKED = 0.5 + 1 / 16
_UNITS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclasses.dataclass(frozen=True)
class Item:
    """One line of a plan.

    Attributes:
        name: What uses the memory.
        size: Size in bytes.
        phase: The phase in which it is allocated.
        field: The config field to change, with a better value, to make it smaller; "" if there is none.
        shortage: Text of an error if the KV cache cannot hold one row; "" otherwise.
        estimated: Whether the size is an estimate, because the compiler decides it; other sizes follow from shapes.
        least: Size in bytes with the best value of `field`. A lower `lora.rank` would train another adapter.
    """

    name: str
    size: int
    phase: Phase
    field: str = ""
    shortage: str = ""
    estimated: bool = False
    least: int = 0

    @property
    def required(self) -> int:
        """The bytes that no setting saves."""
        return self.least if self.field else self.size

    @property
    def saved(self) -> int:
        """The bytes that `field` can save."""
        return self.size - self.required


@dataclasses.dataclass(frozen=True)
class Plan:
    """The estimated device memory of a run, and what was chosen so that it fits; `print` shows it as a table.

    Attributes:
        cfg: The run, with all values that its config leaves to the plan: the tokens of a micro-batch, and what is
            recomputed.
        arch: The shape of its base.
        items: Everything that uses memory on a device, by phase; the first item is the linears of the base.
        about_update: A line about micro-batches and recomputation.
        rows: Rows of a rollout of each replica; the memory is the same on all devices.
        limit: Bytes that the device offers; None if it does not report them.
        free: Bytes of these that sampling has for its cache and its workspace.
    """

    cfg: RunConfig
    arch: architecture.Architecture
    items: tuple[Item, ...]
    about_update: str
    rows: tuple[int, ...]
    limit: int | None = None
    free: int | None = None

    def size(self, *phases: Phase) -> int:
        """Returns the bytes of all items of the given phases."""
        return sum(item.size for item in self.items if item.phase in phases)

    @property
    def peak(self) -> int:
        """The bytes that are in use in the phase that needs the most."""
        return self.size("always") + max(self.size(phase) for phase in _TURNS)

    @property
    def fits(self) -> bool | None:
        """Whether the run fits; None if the device does not report its memory."""
        try:
            self.require()
        except ConfigError:
            return False
        return None if self.limit is None else True

    def require(self) -> None:
        """Checks that the run fits, and that its cache can hold a row. Without a limit everything fits.

        Raises:
            ConfigError: If not; it names the fields to change, or what would fit if no field is enough.
        """
        limit = self.limit
        if limit is None:
            return
        if self.peak <= limit:
            for item in self.items:
                if item.shortage:
                    raise ConfigError(item.shortage)
            return
        required = lambda turn: sum(item.required for item in self._within(turn))
        fullest, tightest = max(_TURNS, key=self.size), max(_TURNS, key=required)
        advice = f"change {self._changes(limit)}"
        if required(tightest) > limit:
            advice = self._instead(self._within(tightest), limit)
        count = len(self.rows) * self.cfg.mesh.group
        offers = "the device offers" if count == 1 else f"each of {count} devices offers"
        needs = f"this run needs {_gb(self.peak)} in its {fullest}"
        raise ConfigError(f"memory: {needs}; {offers} {_gb(limit)}: {advice}")

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def _within(self, turn: Phase) -> list[Item]:
        return [item for item in self.items if item.phase in ("always", turn)]

    def _changes(self, limit: int) -> str:
        """Returns the fields that save the most, with what they save on: so many that every phase can fit."""
        chosen: list[Item] = []
        for turn in sorted(_TURNS, key=self.size, reverse=True):
            items = self._within(turn)
            excess = sum(item.size for item in items) - limit
            excess -= sum(item.saved for item in items if item in chosen)
            for item in sorted(items, key=lambda item: -item.saved):
                if excess > 0 and item not in chosen:
                    chosen.append(item)
                    excess -= item.saved
        fields: dict[str, list[str]] = {}
        for item in chosen:
            fields.setdefault(item.field, []).append(f"{item.name} {_gb(item.size)}")
        return " and ".join(f"{field} ({'; '.join(names)})" for field, names in fields.items())

    def _instead(self, items: Sequence[Item], limit: int) -> str:
        """Says what needs more than `limit` with any settings, and what would fit instead."""
        required = sum(item.required for item in items)
        by_rank = sum(item.required for item in items if item.field == "lora.rank")
        would = ["a lower lora.rank"] * (required - by_rank < limit)
        would += ["a smaller model", "a larger card"]
        if required - self.items[0].required < limit:
            several = "more" if self.cfg.mesh.group > 1 else "several"
            would.append(f"{several} cards that share the base (mesh.fsdp, mesh.tensor)")
        large = [item for item in items if item.required > limit // 100]
        needed = "; ".join(f"{item.name} {_gb(item.required)}" for item in large)
        return (
            f"no setting saves enough, because at least {_gb(required)} are needed ({needed}). "
            f"What would help: {', '.join(would[:-1])}, or {would[-1]}"
        )

    def exhaustion(self, error: BaseException, phase: Phase) -> MemoryError | None:
        """Returns the error to raise for one that says that the device ran out of memory; None for any other.

        It names the largest estimated item of the phase (sizes that follow from shapes are exact) and the setting
        that makes it smaller. If JAX's preallocation is switched off, fragmentation is the more likely cause: memory
        is then taken in regions of doubled sizes, which may be too small for a second large array.

        Args:
            error: The error that was raised.
            phase: The phase of the run; "always" while its weights were loaded.
        """
        is_exhausted, requested = exhausted(error)
        if not is_exhausted or isinstance(error, OSError):
            return None
        items = [item for item in self.items if item.phase == phase and item.field]
        wrong = max(items, key=lambda item: (item.estimated, item.size))
        in_regions = os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE", "").lower() in ("0", "false")
        doing = "preparation" if phase == "always" else phase
        asked_for = "" if requested is None else f" when it asked for {_gb(requested)}"
        estimate, largest = (
            "is an estimate, and was too low",
            "is the largest that a setting makes smaller",
        )
        offered = "" if self.limit is None else f" of {_gb(self.limit)}"
        culprit = f"of which {wrong.name!r} ({_gb(wrong.size)}) {estimate if wrong.estimated else largest}: "
        if in_regions:
            culprit = (
                "which may be there, but in blocks too small for one array: "
                "unset XLA_PYTHON_CLIENT_PREALLOCATE, or "
            )
        return MemoryError(
            f"memory: the device ran out of memory in the {doing}{asked_for}. The plan had "
            f"{_gb(self.size(*{'always', phase}))}{offered} for it, {culprit}change {wrong.field}"
        )

    def require_one_base(self, in_use: int, peak: int) -> None:
        """Checks from the bytes in use after a step, and at the peak, that there is only one copy of the base.

        The measured values may exceed the plan by half of the base, or 1 GiB if that is more. If the base itself is
        trained, there is no frozen base to check.

        Raises:
            RuntimeError: If more memory is or was in use; it has both numbers.
        """
        base = self.items[0].size
        for measured, planned, when in (
            (in_use, self.size("always"), "are in use after a step"),
            (peak, self.peak, "were in use at the peak"),
        ):
            if base and measured > planned + max(base // 2, 2**30):
                raise RuntimeError(
                    f"memory: {_gb(measured)} {when}, where {_gb(planned)} are planned: another copy of "
                    f"the base ({_gb(base)}), or a cache that was not released"
                )

    def lines(self, measured: int | None = None) -> list[str]:
        """Returns the plan as lines of a table, with the measured peak in bytes if it is known."""
        rows = []
        for phase in ("always", *_TURNS):
            items = [item for item in self.items if item.phase == phase]
            rows += [_line(phase, item.name, item.size) for item in items]
            rows += [_line(phase, "in all", self.size(phase))] if items else []
            rows += [f"{phase:10}  {self.about_update}"] if phase == "update" else []
        rows.append(_line("peak", "always, and the largest of the others", self.peak))
        if measured is not None:
            rows.append(f"{_line('peak', 'measured', measured)} ({measured / self.peak - 1:+.0%})")
        if self.limit is not None:
            rows.append(_line("device", "what it offers", self.limit))
        group, how = self.cfg.mesh.group, "tensor" if self.cfg.mesh.tensor > 1 else "fsdp"
        parts = [(*row, part) for row in enumerate(self.rows) for part in range(group)]
        for number, (shard, count, part) in enumerate(parts if len(parts) > 1 else ()):
            name = f"data {shard}{f', {how} {part}' * (group > 1)}, {count} rows of a rollout"
            rows.append(_line(f"device {number}", name, self.peak))
        return rows


def plan(
    cfg: RunConfig,
    arch: architecture.Architecture | None = None,
    *,
    limit: int | None = None,
    device: runtime.Device | None = None,
) -> Plan:
    """Estimates the memory of a run on each of its devices, and chooses what its config leaves open.

    Among choices that fit, larger micro-batches are preferred to less recomputation. If none fits, the choice with
    the least memory is taken. If `limit` is None, "auto" recomputation means "layer".

    Args:
        cfg: The run.
        arch: The shape of its base; None reads it from the model's config.json, or for a known model from
            `architecture.KNOWN`.
        limit: Bytes that the device offers, which bound the size of the KV cache; None for no bound.
        device: The device to plan for; None means this one.

    Raises:
        ConfigError: If the run's rows are longer than the base's context, or devices cannot share the base as asked.
    """
    arch = arch or _architecture(cfg)
    require_context(cfg, arch)
    Division(arch, cfg.mesh.tensor, cfg.model.weights).require()
    always, trained = _always(cfg, arch)
    size, devices = sum(item.size for item in always), places(cfg.mesh, cfg.generation_batch_size)
    # With full training, the weights are copied to the sampler's dtype before the cache is allocated.
    copied = trained * _width(cfg) // 4 if cfg.model.trainable == "full" else 0
    free = None if limit is None else max(0, limit - size - copied)
    # The model is traced here: with the kernels of this device, which need not be those of the device to plan for.
    gathered = {phase: _gathered(cfg, arch, phase) for phase in _TURNS}
    with runtime.on(device or runtime.device()):
        chosen = _chosen(cfg, arch, limit, size, trained)
        items = [*always]
        for phase in ("rollout", "evaluation") if cfg.eval else ("rollout",):
            items += _sampling(cfg, arch, free, phase, devices) + gathered[phase]
            items += [Item("weights as sampled", copied, phase)] if copied else []
        items += _update(chosen, arch, trained) + gathered["update"]
    ends = [cfg.generation_batch_size * device // devices for device in range(devices + 1)]
    rows = tuple(end - start for start, end in itertools.pairwise(ends))
    return Plan(chosen, arch, tuple(items), _about_update(cfg, chosen), rows, limit, free)


def _about_update(cfg: RunConfig, chosen: RunConfig) -> str:
    """Returns a line about the micro-batches and the recomputation of an update, and which of them the plan chose."""
    shapes, how = update_shapes(chosen), chosen.model.gradient_checkpointing
    tokens = max(shape.tokens for shape in shapes)
    is_planned = cfg.optim.max_tokens_per_microbatch is None and cfg.grpo.loss_type != "bnpo"
    by_plan = " (by the plan)" * is_planned
    auto = " (auto)" * (cfg.model.gradient_checkpointing == "auto")
    return (
        f"micro-batches of {tokens} tokens{by_plan} in at most {len(shapes)} shapes; "
        f"gradient_checkpointing {how}{auto}"
    )


def exhausted(error: BaseException) -> tuple[bool, int | None]:
    """Returns whether an error is about exhausted device memory, and the bytes asked for, or None if unknown."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
        return False, None
    match = re.search(r"allocat\w* ([\d.]+)\s*([KMG]i?B)?", text)
    if match is None:
        return True, None
    return True, round(float(match[1].rstrip(".")) * _UNITS.get(match[2], 1))


def require_context(cfg: RunConfig, arch: architecture.Architecture | None = None) -> None:
    """Checks that rows fit in the base's context, see `Architecture.require_context`.

    A shape of `architecture.KNOWN` has no context of its own: that is known only when a base is loaded.

    Raises:
        ConfigError: If rows are too long.
    """
    prompt, completion = cfg.data.max_prompt_length, cfg.rollout.max_completion_length
    field = "rollout.max_completion_length"
    (arch or _architecture(cfg)).require_context(prompt, completion, field)


def device_memory() -> int | None:
    """Returns the bytes that XLA may use on a device; None if the device does not report them, as a CPU."""
    return (runtime.memory_stats() or {}).get("bytes_limit")


def peak_memory() -> int:
    """Returns the peak device memory of this process, in bytes; 0 if the device does not report it."""
    return (runtime.memory_stats() or {}).get("peak_bytes_in_use", 0)


def parse_size(text: str) -> int:
    """Parses a size such as "80GB" or "74.5 gib", or a plain number of bytes, which must be at least a million.

    Raises:
        ConfigError: For any other text.
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", text.strip().lower())
    number, unit = match.groups() if match else ("", "")
    size = round(float(number or 0) * _UNITS.get(unit, 1))
    holds = unit in _UNITS or (match is not None and not unit and size >= 1e6)
    hint = f"; for gigabytes write {number}GB" if match else ""
    require(holds, "device-memory", text, f"must be a size such as 80GB or 74.5GiB{hint}")
    return size


def compiled_update(plan: Plan) -> Any:
    """Compiles the gradient of a plan's largest micro-batch for the default device; returns its `memory_analysis()`.

    No weights are allocated. The workspace depends on the kind of device.
    """
    cfg, shape = plan.cfg, jax.ShapeDtypeStruct
    model, params, frozen = abstract_policy(cfg, plan.arch)
    largest = max(update_shapes(cfg), key=lambda shape: (shape.tokens, shape.slots))
    layout = microbatches.MicroBatch(largest, microbatches.empty_rows(largest.num_rows)).packing
    number, logps = shape((), jnp.int32), shape((largest.tokens,), jnp.float32)
    has = {"ref_logps": cfg.grpo.reference, "high_entropy": cfg.grpo.top_entropy_quantile < 1}
    has["ages"] = cfg.rollout.carry
    batch = experience.PackedRows(
        jax.tree.map(lambda x: shape(x.shape, x.dtype), layout),
        tokens=shape((largest.tokens,), jnp.int32),
        mask=shape((largest.tokens,), jnp.bool_),
        behaviour_logps=logps,
        advantages=shape((largest.num_rows,), jnp.float32),
        fixed={name: logps for name, is_used in has.items() if is_used},
    )
    totals = grpo.BatchTotals(number, number, number, cfg.optim.gradient_accumulation_steps)
    if cfg.grpo.entropy is not None:
        coef = shape((), jnp.float32)
        totals = dataclasses.replace(totals, entropy_tokens=number, entropy_coef=coef)
    objective = update.make_updater(cfg, model, model.arch.vocab_size, total_steps=1).objective
    key = jax.eval_shape(lambda: jax.random.key(0))
    options = update.accumulator(objective).func.compiler_options
    program = jax.jit(functools.partial(gradient, objective), compiler_options=options)
    return program.lower(params, frozen, None, batch, totals, key).compile().memory_analysis()


def abstract_policy(
    cfg: RunConfig, arch: architecture.Architecture
) -> tuple[Transformer, Any, Any]:
    """Returns the model, and shapes and dtypes of its trained and its frozen parameters."""
    model = _model(cfg, arch)
    base, new = abstract_base(model.clone(full=False)), functools.partial(trainable, model)
    return model, *jax.eval_shape(new, base, jax.random.key(0))


def sampled_policy(cfg: RunConfig, arch: architecture.Architecture | None = None) -> Transformer:
    """Returns the model that a device samples with: its part of the policy if devices decode rows together."""
    mesh = {"fsdp": cfg.mesh.fsdp, "tensor": cfg.mesh.tensor}
    return _model(cfg, arch or _architecture(cfg)).clone(**mesh).own_part


def _model(cfg: RunConfig, arch: architecture.Architecture) -> Transformer:
    full, linears = cfg.model.trainable == "full", _dense_linears(cfg, arch)
    lora, dtype = None if full else cfg.lora, jnp.dtype(cfg.model.dtype)
    return Transformer(arch, cfg.model.weights, lora, dtype, full=full, dense_linears=linears)


def _always(cfg: RunConfig, arch: architecture.Architecture) -> tuple[list[Item], int]:
    """Returns the items that are always in memory, and the bytes of the trained parameters."""
    model, params, frozen = abstract_policy(cfg, arch)
    adapter, state = _bytes(params), _state_bytes(cfg.optim, params)
    eight_bit = dataclasses.replace(cfg.optim, optimizer="adamw_8bit")
    # What the optimizer needs also depends on the rank, but that is another adapter.
    smaller = _rank(cfg) if cfg.optim == eight_bit else 'optim.optimizer to "adamw_8bit"'
    stacked = _bytes([frozen.get(name, {}) for name in ("layers", "dense_overrides")])
    base = abstract_base(model.clone(tensor=cfg.mesh.tensor)) if cfg.mesh.tensor > 1 else frozen
    local = sharding.part(base, cfg.mesh.group)
    linears, to_pack, packed = local - _bytes(frozen) + stacked, "", 0
    if cfg.model.weights in DENSE and cfg.model.trainable == "lora":
        to_pack = 'model.weights to "nvfp4"'
        packed = round(linears * _PACKED / jnp.dtype(cfg.model.weights).itemsize)
    items = [
        Item("base: linears, norms, biases", linears, "always", to_pack, least=packed),
        Item("base: embedding, head", _bytes(frozen) - stacked, "always"),
        Item("what trains", adapter, "always", _rank(cfg), least=adapter),
        Item("optimizer", state, "always", smaller, least=_state_bytes(eight_bit, params)),
    ]
    if cfg.keeps_reference:
        less = 'grpo.reference.policy to "base"' if cfg.model.trainable == "lora" else ""
        items.append(Item("reference", adapter, "always", less))
    return items, adapter


def _chosen(
    cfg: RunConfig, arch: architecture.Architecture, limit: int | None, always: int, adapter: int
) -> RunConfig:
    """Returns the config as `plan` completes it; `always` and `adapter` are bytes of the constant items and of the
    trained parameters."""
    remats: tuple[Remat, ...] = ("layer",) if limit is None else ("products", "mlp", "layer")
    if cfg.model.gradient_checkpointing != "auto":
        remats = (cfg.model.gradient_checkpointing,)
    models = [dataclasses.replace(cfg.model, gradient_checkpointing=remat) for remat in remats]
    budgets = [{"max_tokens_per_microbatch": budget} for budget in _budgets(cfg, limit)]
    optims = [dataclasses.replace(cfg.optim, **budget) for budget in budgets]
    candidates = [dataclasses.replace(cfg, model=m, optim=o) for o in optims for m in models]
    # If none fits, the last one is returned, and `Plan.require` then says what would help.
    for candidate in candidates[:-1]:
        size = always + sum(item.size for item in _update(candidate, arch, adapter))
        if limit is None or size <= _CHOSEN_SHARE * limit:
            return candidate
    return candidates[-1]


def _budgets(cfg: RunConfig, limit: int | None) -> list[int | None]:
    """Returns the micro-batch sizes in tokens that the plan may choose: repeated halves, down to the longest row."""
    budget = cfg.optim.max_tokens_per_microbatch
    if budget is not None or cfg.grpo.loss_type == "bnpo":
        return [budget]
    longest = cfg.data.max_prompt_length + cfg.rollout.max_completion_length
    budgets = [microbatches.token_budget(cfg.optim, **_update_sizes(cfg))]
    while limit is not None and budgets[-1] > longest:
        budgets.append(max(longest, budgets[-1] // 2))
    return budgets


def _sampling(
    cfg: RunConfig, arch: architecture.Architecture, free: int | None, phase: Phase, devices: int
) -> list[Item]:
    """Returns the items of rollouts or evaluations, whose rows so many devices divide."""
    prompts, group = cfg.prompts_per_rollout, cfg.rollout.num_generations
    if phase == "evaluation":
        prompts, group = cfg.eval.num_problems, cfg.eval.num_generations
    carry = cfg.rollout.carry if phase == "rollout" else 0
    rows, has_row_noise = prompts * group + carry, phase == "rollout" and cfg.has_row_noise
    if has_row_noise and cfg.noise.per == "sequence":
        prompts = rows
    prompts, rows = -(-prompts // devices), -(-rows // devices)
    fused_rows = fused_decode.most_rows(sampled_policy(cfg, arch), own_noise=has_row_noise)
    arch = Division(arch, cfg.mesh.tensor, cfg.model.weights).part
    longest = cfg.data.max_prompt_length - 1 + cfg.rollout.max_completion_length
    tokens, fraction = cfg.rollout.kv_cache_tokens, cfg.rollout.kv_cache_fraction
    page = kv_cache.PAGE_SIZE
    drafts, positions = Drafting.named(cfg.drafts), 0
    if drafts is not None and cfg.rollout.compact:
        positions = drafts.tokens_of_a_step(cfg.rollout.max_completion_length)
    demand = kv_capacity.Demand(
        *(arch, rows, prompts, cfg.data.max_prompt_length, longest, page, cfg.rollout.compact),
        *(_width(cfg), carry > 0, positions, fused_rows),
    )

    def capacity(slots: int) -> int | None:
        if tokens is not None or free is None:
            return tokens
        beside = sum(demand.workspace(slots).values())
        return kv_capacity.capacity(arch, free, fraction, beside, _width(cfg))

    slots = min(rows, demand.slots(cfg.rollout.max_concurrent, capacity))
    pages, shortage = demand.pages(slots), ""
    if (cache_tokens := capacity(slots)) is not None:
        # Rows wait while the cache is full, so it may be as small as one row.
        least = cache_tokens if tokens is not None else max(longest, cache_tokens)
        pages = min(pages, kv_capacity.pages_for(least, page))
    if tokens is None and cache_tokens is not None:
        if kv_capacity.pages_for(cache_tokens, page) < kv_capacity.pages_for(longest, page):
            cause = "memory:" if fraction is None else f"rollout.kv_cache_fraction: got {fraction};"
            shortage = (
                f"{cause} the KV cache would have space for {cache_tokens} tokens; a row "
                f"of data.max_prompt_length + rollout.max_completion_length may need {longest}"
            )
    field = "rollout.kv_cache_tokens" if fraction is None else "rollout.kv_cache_fraction"
    fewer = "rollout.max_concurrent" if slots > 1 else "rollout.max_completion_length"
    size = pages * page * arch.kv_bytes(_width(cfg))
    items = [Item("keys and values", size, phase, field, shortage)]
    for name, size in demand.workspace(slots).items():
        items.append(Item(name, size, phase, fewer, estimated=True))
    if has_row_noise:
        # Vectors for two norms per layer, and their random bits, in 4 bytes.
        size = 2 * 2 * arch.num_layers * slots * arch.width * 4
        items.append(Item("noise of each row's own", size, phase, "noise.per"))
    return items


def _gathered(cfg: RunConfig, arch: architecture.Architecture, phase: Phase) -> list[Item]:
    """Returns the item of gathered weights if devices share a base: those of the current and the next layer.

    Devices that decode rows together gather weights only in updates, and then also assemble the parts of a layer. In
    rollouts each copies the rows of the head with which it computes logits.
    """
    together = cfg.mesh.tensor > 1
    if cfg.mesh.group == 1:
        return []
    if together and phase != "update":
        size = arch.vocab_size * arch.width * _width(cfg) // cfg.mesh.tensor
        return [Item("head: rows of each device", size, phase, estimated=True)]
    frozen = abstract_policy(cfg, arch)[2]["layers"]
    size = (3 if together else 2) * _bytes(frozen) // arch.num_layers
    return [Item("gathered weights of two layers", size, phase, estimated=True)]


def _update(cfg: RunConfig, arch: architecture.Architecture, adapter: int) -> list[Item]:
    shapes, width = update_shapes(cfg), _width(cfg)
    tokens = max(shape.tokens for shape in shapes)
    # The gradients of prompts exist for each row, before and after they are summed.
    slots = max(_SLOTS * shape.slots + 2 * shape.num_rows * shape.prompt_width for shape in shapes)
    inputs = arch.query_width + 2 * arch.kv_width
    row = cfg.data.max_prompt_length + cfg.rollout.max_completion_length
    fewer = "rollout.max_completion_length"
    if cfg.grpo.loss_type == "bnpo":
        fewer = "optim.per_device_train_batch_size"
    elif tokens > row:
        fewer = f"optim.max_tokens_per_microbatch, which may go down to {row}, from {tokens}"

    activations = {
        "layer": 0,
        "mlp": inputs + arch.width,
        "products": inputs + arch.width + 2 * arch.ffn_width,
        "none": _KEPT_FFN * arch.ffn_width + _KEPT_WIDTH * arch.width + _KEPT_INPUTS * inputs,
    }[cfg.model.gradient_checkpointing]
    activations *= tokens
    ffn = _FFN if cfg.model.gradient_checkpointing in ("layer", "mlp") else _FFN - 2
    mlp = tokens * ((ffn - 1) * arch.ffn_width + _WIDTH * arch.width + inputs)
    attention = slots * inputs
    # A dequantized weight and the last of the MLP's arrays do not exist at the same time. A dense weight is copied
    # out of its stack in addition to all of them.
    weight, last = max(map(arch.linear_size, arch.linears())), tokens * arch.ffn_width
    mlp += max(last, weight) if cfg.model.weights == "nvfp4" else last + weight
    chunk = min(_CHUNK_ROWS, tokens)
    head = round(_CHUNK * chunk * arch.vocab_size * 4)
    # The states before the head, and their gradients: from log-probabilities, and from an entropy bonus.
    states = (3 if cfg.grpo.entropy else 2) * tokens * arch.width * width
    workspace = max(mlp * width, attention * width, head + states)
    less = 'model.gradient_checkpointing to "layer"' if activations else ""
    inputs, outputs = (arch.num_layers * n * width for n in (tokens * arch.width, activations))
    items = [
        Item("gradients, summed and new", 2 * adapter, "update", _rank(cfg), least=2 * adapter),
        Item("inputs of the layers", inputs, "update", fewer),
        Item("kept of the layers", outputs, "update", less),
        Item("workspace of a layer, or of the head", workspace, "update", fewer, estimated=True),
    ]
    # GPUs without cuDNN's attention (compute capability below 8.0) store scores. So does a CPU, but it reports no
    # memory, and plans that are made there are for a GPU.
    is_fused = layers.has_fused_attention(jnp.dtype(cfg.model.dtype), arch.head_size)
    if not is_fused and runtime.platform() != "cpu":
        most = max(sum(count * width**2 for count, width in shape.arrays) for shape in shapes)
        size = _SCORE * arch.num_heads * most
        items.append(Item("scores of attention", size, "update", fewer, estimated=True))
    return items


def update_shapes(cfg: RunConfig) -> tuple[microbatches.Shape, ...]:
    """Returns all shapes that the micro-batches of a run can have; see `microbatches.update_shapes`."""
    return microbatches.update_shapes(cfg.optim, cfg.grpo.loss_type, **_update_sizes(cfg))


def _update_sizes(cfg: RunConfig) -> dict[str, int]:
    group = cfg.rollout.num_generations if cfg.optim.share_prompts else 1
    prompt, completion = cfg.data.max_prompt_length, cfg.rollout.max_completion_length
    return {"group": group, "prompt_width": prompt, "completion_width": completion}


def _architecture(cfg: RunConfig) -> architecture.Architecture:
    name = cfg.model.model_name_or_path
    known = architecture.known(name)
    if known and not pathlib.Path(name).expanduser().is_dir():
        return known
    folder = hf_folder.local_folder(name, weights=False)
    return FolderTensors(folder).arch if _has_weights(cfg) else architecture.load(folder)


def _has_weights(cfg: RunConfig) -> bool:
    """Whether the base is a local folder with weights that the run reads."""
    folder = pathlib.Path(cfg.model.model_name_or_path).expanduser()
    return not cfg.model.random_base and any(folder.glob("*.safetensors"))


def _dense_linears(cfg: RunConfig, arch: architecture.Architecture) -> DenseLinears:
    """Returns the linears that a local model folder does not pack."""
    folder = pathlib.Path(cfg.model.model_name_or_path).expanduser()
    return FolderTensors(folder, arch).dense_linears() if _has_weights(cfg) else ()


def _rank(cfg: RunConfig) -> str:
    """Returns the field on which the size of the trained parameters depends; "" if there is none."""
    return "lora.rank" if cfg.model.trainable == "lora" else ""


def _width(cfg: RunConfig) -> int:
    return jnp.dtype(cfg.model.dtype).itemsize


def _state_bytes(cfg: OptimConfig, params: Any) -> int:
    """Returns the bytes of an optimizer's state."""
    return _bytes(jax.eval_shape(optimizer.transformation(cfg).init, params))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _line(phase: str, name: str, size: int) -> str:
    return f"{phase:10}  {name:45} {_gb(size):>10}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
