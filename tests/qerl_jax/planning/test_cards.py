import dataclasses

import pytest

from qerl_jax.api import settings
from qerl_jax.cli import main
from qerl_jax.config import NoiseConfig
from qerl_jax.model import architecture
from qerl_jax.planning import cards, memory


def test_a_card_is_found_by_what_people_call_it_and_an_unknown_one_lists_the_known_ones():
    names = [cards.named(text).name for text in ("RTX 4090", "nvidia rtx 4090", "3090", "h100")]
    assert names == ["RTX 4090", "RTX 4090", "RTX 3090", "H100"]
    with pytest.raises(ValueError, match=r"got 'RTX 409'; must be one of T4, L4.*mean RTX 4090\?"):
        cards.named("RTX 409")
    with pytest.raises(ValueError, match="B200; for another card give its --device-memory$"):
        cards.named("V100")


@pytest.mark.slow
def test_the_recipe_is_a_run_that_every_known_shape_can_be_planned_for():
    for model, arch in architecture.KNOWN.items():
        assert memory.plan(cards.recipe(model), arch).peak > 0


@pytest.mark.slow
def test_larger_cards_train_larger_models(capsys, monkeypatch):
    few = {name: architecture.KNOWN[name] for name in ("qwen2.5-1.5b", "qwen2.5-32b")}
    monkeypatch.setattr(architecture, "KNOWN", few)
    trains = {}
    for name in ("T4", "H100"):
        assert main.main(["plan", "--device", name]) == 0
        lines = capsys.readouterr().out.splitlines()
        trains[name] = [line.split()[1] for line in lines if line.startswith("  yes")]
    # The second is the paper's claim for a card of 80 GB.
    assert trains == {"T4": ["qwen2.5-1.5b"], "H100": [*few]}


def run(**sections):
    """Returns a run of a small published shape with other fields."""
    return settings.run_config(cards.recipe("qwen2.5-0.5b"), sections)


PLAIN, SLOW = "plain layers, products by", "the reference, which is slow"
PORTABLE_BFLOAT16 = {"weights": "bfloat16", "kernels": "portable"}


@pytest.mark.parametrize(
    ("name", "sections", "lines"),
    [
        ("T4", {}, ["fused layers: portable", "in float16 (extra triton; compiled, never run)"]),
        ("A100", {}, ["fused layers: portable kernels, in bfloat16"]),
        ("H100", {}, ["fused layers: Hopper kernels"]),
        ("L4", {"weights": "mxfp4"}, ["fused layers: portable kernels, in bfloat16"]),
        ("H200", {"kernels": "portable"}, ["fused layers: portable", "run on an H200 only"]),
        ("H200", {"weights": "nf4"}, ["fused layers: portable kernels"]),
        ("H200", {"weights": "bfloat16"}, ["fused layers: Hopper kernels"]),
        ("T4", {"weights": "mxfp4"}, [f"{PLAIN} {SLOW}", "compute capability 8.0 for MXFP4"]),
        ("L4", {"kernels": "reference"}, [f"{PLAIN} {SLOW}", "kernels 'reference' were chosen"]),
        ("L4", {"dtype": "float32"}, [f"{PLAIN} {SLOW}", "needs activations in bfloat16"]),
        ("A100", {"weights": "bfloat16"}, [f"{PLAIN} cuBLAS", "and packed weights; got bfloat16"]),
        ("A100", {"weights": "float32"}, [f"{PLAIN} cuBLAS", "got bfloat16, float32"]),
        ("RTX 4090", {"weights": "bfloat16"}, [f"{PLAIN} cuBLAS", "and packed weights"]),
        ("H100", PORTABLE_BFLOAT16, [f"{PLAIN} cuBLAS", "and packed weights"]),
        ("RTX 4090", {"lora": {"rank": 512}}, ["portable kernels", "needs LoRA of rank <= 256"]),
        ("H100", {"mesh": {"fsdp": 2}}, ["products by Hopper kernels", "all of them on each"]),
        ("L4", {"mesh": {"fsdp": 2}}, ["products by portable kernels", "all of them on each"]),
        ("H100", {"mesh": {"tensor": 2}}, ["fused layers: Hopper kernels"]),
    ],
)
def test_a_card_says_what_samples_a_run(name, sections, lines):
    """Sections without a name are fields of the model."""
    is_named = all(isinstance(section, dict) for section in sections.values())
    line = cards.named(name).kernels(run(**(sections if is_named else {"model": sections})))
    assert all(text in line for text in lines), line
    if not sections:
        assert cards.named(name).kernels() == line  # of the recipe of another model


def test_linears_in_16_bits_noise_of_rows_and_heads_of_another_size_take_plain_layers(monkeypatch):
    card, cfg = cards.named("A100"), run()
    noisy = dataclasses.replace(cfg, noise=NoiseConfig(1e-2, 1e-4, 10, per="sequence"))
    assert "rows have noise of their own" in card.kernels(noisy)
    monkeypatch.setattr(memory, "_dense_linears", lambda *_: (("o", (0,)),))
    assert f"{PLAIN} portable" in card.kernels(cfg) and "are kept in 16 bits" in card.kernels(cfg)
    monkeypatch.undo()
    arch = dataclasses.replace(architecture.KNOWN["qwen2.5-0.5b"], head_size=96)
    monkeypatch.setitem(architecture.KNOWN, "qwen2.5-0.5b", arch)
    assert "attention needs heads of size" in cards.named("A100").kernels(run())
    # Kernels that a card does not have are refused.
    with pytest.raises(ValueError, match=r"model.kernels: got 'hopper'.* 9.0; this is NVIDIA RTX"):
        cards.named("RTX 4090").kernels(run(model={"kernels": "hopper"}))


def test_a_config_is_planned_for_a_card(capsys):
    run = ["plan", "configs/quickstart.toml", "--device", "RTX 3090"]
    assert main.main(run) == 0
    said = capsys.readouterr().out
    assert "23.19 GB" in said and f"sampling    {PLAIN} {SLOW}" in said
    assert main.main([*run, "--model.dtype", "bfloat16"]) == 0
    assert "sampling    fused layers: portable kernels, in bfloat16" in capsys.readouterr().out
