"""Which model sizes train on a card, from the memory plan; needs no card and no weights."""

import dataclasses

from qerl_jax import memory
from qerl_jax.checked import from_table, meant, require
from qerl_jax.config import DENSE, ModelConfig, RunConfig
from qerl_jax.model import architecture

# Share of a card's memory that JAX takes in a run that may use all of it: XLA_PYTHON_CLIENT_MEM_FRACTION. JAX's
# default is three quarters.
FRACTION = 0.9


@dataclasses.dataclass(frozen=True)
class Card:
    """An NVIDIA card.

    Attributes:
        name: Its common name.
        mebibytes: Its memory in MiB, as the driver reports it.
        capability: Its compute capability.
    """

    name: str
    mebibytes: int
    capability: str

    @property
    def limit(self) -> int:
        """Bytes that a run may use."""
        return int(self.mebibytes * 2**20 * FRACTION)

    def kernels(self, model: ModelConfig | None = None) -> str:
        """The kernels that it uses by default, or for a model, and how far they were tested, in words.

        Raises:
            ConfigError: The model names kernels that cannot run on it.
        """
        is_hopper, is_old = self.capability == "9.0", self.capability == "7.5"
        asked, weights, dtype = "auto", "nvfp4", "bfloat16"
        if model is not None:
            asked, weights, dtype = model.kernels, model.weights, model.dtype
        rule = f"cannot run on this card: needs compute capability 9.0; it has {self.capability}"
        require(asked != "hopper" or is_hopper, "model.kernels", asked, rule)
        if asked == "reference":
            return "the reference, which is slow"
        if dtype != "bfloat16":
            return f"the reference, which is slow: kernels need bfloat16, model.dtype is {dtype}"
        if is_old and weights == "mxfp4":
            return "the reference, which is slow: portable kernels have no MXFP4 on this card"
        if is_hopper and asked != "portable" and weights in (*DENSE, "nvfp4"):
            return "Hopper kernels"
        kinds = "float16" if is_old else "bfloat16"
        tested = "run on an H200 only" if is_hopper else "compiled for this card, not run on it"
        return f"portable kernels, in {kinds} (extra triton; {tested})"


CARDS = (
    Card("T4", 15360, "7.5"),
    Card("L4", 23034, "8.9"),
    Card("A100 40GB", 40960, "8.0"),
    Card("A100", 81920, "8.0"),
    Card("RTX 3090", 24576, "8.6"),
    Card("RTX 4090", 24564, "8.9"),
    Card("RTX 5090", 32607, "12.0"),
    Card("H100", 81559, "9.0"),
    Card("H200", 143771, "9.0"),
    Card("B200", 183359, "10.0"),
)


def named(name: str) -> Card:
    """Finds a card by name, in upper or lower case, with or without the maker's name.

    Raises:
        ConfigError: For an unknown name; the error lists the known ones.
    """
    plain = lambda text: "".join(text.lower().replace("nvidia", "").replace("rtx", "").split())
    found = [card for card in CARDS if plain(card.name) == plain(name)]
    known = ", ".join(card.name for card in CARDS)
    # V100 means no H100.
    hint = meant(name, [card.name for card in CARDS], 0.8)
    rule = f"must be one of {known}{hint or '; for another card give its --device-memory'}"
    require(bool(found), "device", name, rule)
    return found[0]


def recipe(model: str) -> RunConfig:
    """A run to plan with: NVFP4, rank 32, steps of 64 completions of up to 1024 tokens, 8 of each prompt."""
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
    """Lines that say which of the published shapes train on a card by `recipe`, and their peak memory."""
    lines = [
        f"{card.name}: {card.mebibytes * 2**20 / 1e9:.1f} GB, of which a run gets {card.limit / 1e9:.1f} "
        f"(set XLA_PYTHON_CLIENT_MEM_FRACTION={FRACTION}); {card.kernels()}",
        "trains by GRPO, NVFP4 base, LoRA of rank 32, 64 completions of 1024 tokens a step. The peak of a smaller",
        "model may be higher, because an update uses what memory is left to be faster:",
    ]
    for model, arch in architecture.KNOWN.items():
        plan = memory.estimate(recipe(model), arch, limit=card.limit)
        try:
            plan.require(card.limit)
            fits = "yes"
        except ValueError:
            fits = "no "
        lines.append(f"  {fits}  {model:18} {plan.peak / 1e9:6.1f} GB")
    return lines
