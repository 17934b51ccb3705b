import pytest

from qerl_jax import cards, memory
from qerl_jax.cli import main
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
    assert said in cards.named(name).kernels


def test_a_config_is_planned_for_a_card(capsys):
    run = ["plan", "configs/quickstart.toml", "--device", "RTX 3090"]
    assert main.main(run) == 0
    assert "23.19 GB" in capsys.readouterr().out
