import pytest

from qerl_jax import cards, memory
from qerl_jax.cli import main
from qerl_jax.config import ModelConfig
from qerl_jax.model import architecture


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("RTX 4090", "RTX 4090"),
        ("nvidia rtx 4090", "RTX 4090"),
        ("3090", "RTX 3090"),
        ("h100", "H100"),
    ],
)
def test_a_card_is_found_by_what_people_call_it(asked, found):
    assert cards.named(asked).name == found


def test_an_unknown_card_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"got 'RTX 409'; must be one of T4, L4.*mean RTX 4090\?"):
        cards.named("RTX 409")
    with pytest.raises(ValueError, match="B200; for another card give its --device-memory$"):
        cards.named("V100")


@pytest.mark.slow
def test_the_recipe_is_a_run_that_every_known_shape_can_be_planned_for():
    for model, arch in architecture.KNOWN.items():
        assert memory.estimate(cards.recipe(model), arch).peak > 0


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


@pytest.mark.parametrize(
    ("name", "said"),
    [("T4", "portable kernels, in float16"), ("A100", "in bfloat16"), ("H100", "Hopper kernels")],
)
def test_a_card_says_its_kernels(name, said):
    assert said in cards.named(name).kernels()


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "T4",
            {"weights": "mxfp4"},
            "the reference, which is slow: portable kernels have no MXFP4",
        ),
        ("L4", {"weights": "mxfp4"}, "portable kernels, in bfloat16"),
        ("L4", {"kernels": "reference"}, "the reference"),
        ("L4", {"dtype": "float32"}, "kernels need bfloat16, model.dtype is float32"),
        ("H200", {"kernels": "portable"}, "run on an H200 only"),
        ("H200", {"weights": "nf4"}, "portable kernels"),
        ("H200", {"weights": "bfloat16"}, "Hopper kernels"),
    ],
)
def test_a_card_says_its_kernels_for_a_model(name, change, said):
    assert said in cards.named(name).kernels(ModelConfig("qerl-tiny", **change))


def test_kernels_that_a_card_does_not_have_are_refused_in_its_plan():
    with pytest.raises(ValueError, match=r"model.kernels: got 'hopper'.* needs .* 9.0; it has 8.9"):
        cards.named("RTX 4090").kernels(ModelConfig("qerl-tiny", kernels="hopper"))


def test_a_config_is_planned_for_a_card(capsys):
    run = ["plan", "configs/quickstart.toml", "--device", "RTX 3090"]
    assert main.main(run) == 0
    said = capsys.readouterr().out
    assert "23.19 GB" in said and "kernels     the reference, which is slow" in said
    assert main.main([*run, "--model.dtype", "bfloat16"]) == 0
    assert "kernels     portable kernels, in bfloat16" in capsys.readouterr().out
