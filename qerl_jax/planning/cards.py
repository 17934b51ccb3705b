"""Estimates which model sizes can be trained on a GPU, from the memory plan; needs no GPU and no weights."""

import dataclasses

import jax

from pallas_kernels import FORMATS, prepare, runtime
from pallas_kernels.nvfp4_matmul.layout import HopperNVFP4
from pallas_kernels.portable.layout import PortableWeight
from qerl_jax.config import DENSE, RunConfig
from qerl_jax.model import architecture, fused_decode
from qerl_jax.model.transformer import Transformer
from qerl_jax.planning import memory
from qerl_jax.system.checked import from_table, meant, require

# Assumed share of a card's memory that JAX may use, XLA_PYTHON_CLIENT_MEM_FRACTION. JAX's default is three quarters.
FRACTION = 0.9
# The most bytes of shared memory of a thread block, by compute capability.
SHARED_BYTES = {"7.5": 64 << 10, "8.0": 163 << 10}
SHARED_BYTES |= dict.fromkeys(("8.6", "8.9", "12.0"), 99 << 10)
SHARED_BYTES |= dict.fromkeys(("9.0", "10.0"), 227 << 10)


@dataclasses.dataclass(frozen=True)
class Card:
    """An NVIDIA GPU.

    Attributes:
        name: Its common name.
        mebibytes: Its memory in MiB, as the driver reports it.
        capability: Its compute capability.
        processors: Number of its streaming multiprocessors.
    """

    name: str
    mebibytes: int
    capability: str
    processors: int

    @property
    def limit(self) -> int:
        """The bytes that a run may use."""
        return int(self.mebibytes * 2**20 * FRACTION)

    @property
    def device(self) -> runtime.Device:
        """The device description for kernels. It assumes that jax-triton is installed, as by the extra `cuda`."""
        name = f"NVIDIA {self.name}"
        return dataclasses.replace(
            runtime.CARDS.get(name, runtime.H200),
            name=name,
            processors=self.processors,
            shared_bytes=SHARED_BYTES[self.capability],
            compute_capability=self.capability,
            has_packages=True,
        )

    def kernels(self, cfg: RunConfig | None = None) -> str:
        """Says which kernels sample the rollouts of a run (None: `recipe` of a known model) on this card.

        Raises:
            ConfigError: If the run names kernels that cannot run on this card.
        """
        cfg = cfg or recipe(next(iter(architecture.KNOWN)))
        kernels = cfg.model.kernels
        with runtime.on(self.device, kernels):
            no_hopper = runtime.unless_hopper()
            rule = f"cannot run on this card: {no_hopper}"
            require(kernels != "hopper" or no_hopper is None, "model.kernels", kernels, rule)
            model = memory.sampled_policy(cfg)
            most = fused_decode.MAX_ROWS
            rows = min(cfg.generation_batch_size, cfg.rollout.max_concurrent or most, most)
            options = {"own_noise": cfg.has_row_noise}
            tested = "run on an H200 only" if self.capability == "9.0" else "compiled, never run"
            kinds = f"{runtime.tensor_core_type()} (extra triton; {tested})"
            names = {"hopper": "Hopper kernels", "portable": f"portable kernels, in {kinds}"}
            if fits := fused_decode.fit(model, rows, **options):
                return f"fused layers: {names[fits]}"
            set_of_kernels = "portable" if no_hopper else "hopper"
            reason = fused_decode.supports(model, rows, set_of_kernels, **options)
            products = _product_kernels(model)
        by = names.get(products, products)
        return f"plain layers, products by {by}; no fused layers: {reason}"


def _product_kernels(model: Transformer) -> str:
    """Returns which kernels multiply with the model's weights, from the layout that `prepare` chooses."""
    if model.weights in DENSE or model.full:
        return "cuBLAS"
    random = FORMATS[model.weights].random
    shape = (64, model.arch.width)
    match jax.eval_shape(lambda: prepare(random(jax.random.key(0), shape), model.dtype)):
        case HopperNVFP4():
            return "hopper"
        case PortableWeight():
            return "portable"
    return "the reference, which is slow"


CARDS = (
    Card("T4", 15360, "7.5", 40),
    Card("L4", 23034, "8.9", 58),
    Card("A100 40GB", 40960, "8.0", 108),
    Card("A100", 81920, "8.0", 108),
    Card("RTX 3090", 24576, "8.6", 82),
    Card("RTX 4090", 24564, "8.9", 128),
    Card("RTX 5090", 32607, "12.0", 170),
    Card("H100", 81559, "9.0", 132),
    Card("H200", 143771, "9.0", 132),
    Card("B200", 183359, "10.0", 148),
)


def named(name: str) -> Card:
    """Finds a card by name, in upper or lower case, with or without "NVIDIA" or "RTX".

    Raises:
        ConfigError: For an unknown name; the error lists the known ones.
    """
    plain = lambda text: "".join(text.lower().replace("nvidia", "").replace("rtx", "").split())
    matches = [card for card in CARDS if plain(card.name) == plain(name)]
    known = ", ".join(card.name for card in CARDS)
    # The names must be very similar: V100, for example, does not mean H100.
    hint = meant(name, [card.name for card in CARDS], 0.8)
    rule = f"must be one of {known}{hint or '; for another card give its --device-memory'}"
    require(bool(matches), "device", name, rule)
    return matches[0]


def recipe(model: str) -> RunConfig:
    """Returns the run that is planned: NVFP4, rank 32, steps of 64 completions of up to 1024 tokens, 8 per prompt."""
    return from_table(
        RunConfig,
        {
            "output_dir": "runs/plan",
            "max_steps": 1,
            "model": {"model_name_or_path": model, "random_base": True},
            "data": {"dataset": "gsm8k", "max_prompt_length": 256},
            "rewards": {"functions": ["accuracy_reward"]},
            "rollout": {
                "num_generations": 8,
                "generation_batch_size": 64,
                "max_concurrent": 64,
                "max_completion_length": 1024,
            },
            "optim": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16},
        },
    )


def describe(card: Card) -> list[str]:
    """Returns lines that say which known models can be trained on a card by `recipe`, and their peak memory."""
    lines = [
        f"{card.name}: {card.mebibytes * 2**20 / 1e9:.1f} GB, of which a run gets {card.limit / 1e9:.1f} "
        f"(set XLA_PYTHON_CLIENT_MEM_FRACTION={FRACTION}); {card.kernels()}",
        "trains by GRPO, NVFP4 base, LoRA of rank 32, 64 completions of 1024 tokens a step. The peak of a smaller",
        "model may be higher, because an update uses what memory is left to be faster:",
    ]
    for model, arch in architecture.KNOWN.items():
        plan = memory.plan(recipe(model), arch, limit=card.limit, device=card.device)
        fits = "yes" if plan.fits else "no "
        lines.append(f"  {fits}  {model:18} {plan.peak / 1e9:6.1f} GB")
    return lines
