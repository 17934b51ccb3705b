"""Tests AWQ: folded scales change only the rounding, and make it better."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from pallas_kernels import FORMATS
from qerl_jax.checkpoint import base_model
from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.checkpoint.safetensors import Tensors
from qerl_jax.config import ModelConfig
from qerl_jax.data import tokenizer
from qerl_jax.model import architecture, layers
from qerl_jax.model.transformer import Transformer, head, run_layer
from qerl_jax.quantization import awq, calibration, quantizer
from qerl_jax.quantization.calibration import Calibration, HiddenStates
from qerl_jax.quantization.quantizer import Recipe
from tests.golden_files import GOLDEN
from tests.pallas_kernels.common import slow

TOKENS = tokenizer.load(TINY)
ROWS = Calibration("arithmetic", num_samples=24, max_length=64)


def load(folder, weights):
    """Loads a model, its frozen base and its tokenizer, to be computed in float32."""
    return load_base(ModelConfig(str(folder), weights=weights, dtype="float32"), None)


def log_softmax(policy, ids):
    """Computes log-probabilities [rows, T - 1, ids] of the next tokens, a few rows at a time."""
    model, frozen, tokens = policy
    of = jax.jit(lambda frozen, ids: model.apply({"frozen": frozen}, ids)[0][:, :-1])
    for part in np.split(ids, len(ids) // 8):
        scores = layers.logits(of(frozen, part), head(frozen))
        yield jax.nn.log_softmax(scores[..., : tokens.num_tokens])


def mean_kl(reference, other, ids, lengths):
    """Computes the mean KL(reference || other) over all predictions, in nats."""
    live = (np.arange(ids.shape[1]) < lengths[:, None])[:, 1:]
    pairs = zip(log_softmax(reference, ids), log_softmax(other, ids), strict=True)
    kls = [np.asarray(jnp.sum(jnp.exp(a) * (a - b), axis=-1)) for a, b in pairs]
    return float(np.concatenate(kls)[live].mean())


FIRST = "model.layers.0."


def first_layer(folder):
    """Returns the architecture of a model, and its first layer's tensors by their names in a folder."""
    tensors = Tensors(folder)
    names = [name for name in tensors if name.startswith(FIRST)]
    return architecture.load(folder), {name: np.array(tensors[name]) for name in names}


def as_tree(arch, tensors):
    def read(_, names):
        return jnp.concatenate([jnp.asarray(tensors[f"{name}.weight"]) for name in names])

    return base_model.read_layer(arch, tensors, FIRST, jnp.float32, read)


def hidden(arch, seed=0, shape=(3, 12)):
    """Makes inputs whose channels differ in size by a factor of a hundred, as in language models."""
    rng = np.random.default_rng(seed)
    sizes = 10 ** rng.uniform(-1, 1, arch.width)
    return jnp.asarray(rng.standard_normal((*shape, arch.width)) * sizes, jnp.float32)


@pytest.mark.parametrize(
    ("name", "form"), [("qwen2_untied", "mxfp4"), slow("qwen3", "mxfp4"), slow("llama3", "nvfp4")]
)
def test_folding_changes_nothing_but_the_rounding(name, form, monkeypatch):
    """Biases of v, several query heads per key, and norms of heads see the same numbers after it."""
    monkeypatch.setattr(awq, "GRID", 4)
    arch, tensors = first_layer(GOLDEN / "models" / name)
    model, x = Transformer(arch, "float32", None, jnp.float32), hidden(arch)
    run = jax.jit(lambda layer: run_layer(model, layer, x))
    expected, inputs = run(as_tree(arch, tensors))
    live = jnp.ones(x.shape[:2], bool)
    seen = {
        linear: awq.observe(awq.no_inputs(arch.input_width(linear)), inputs[linear], live)
        for linear in arch.linears()
    }
    folded = awq.fold(arch, FORMATS[form], "maximum", tensors, FIRST, seen)
    actual, new_inputs = run(as_tree(arch, folded.tensors))
    scale = np.abs(np.asarray(expected)).max()
    np.testing.assert_allclose(actual, expected, atol=2e-6 * scale)
    for linear in arch.linears():
        moved = np.abs(np.asarray(new_inputs[linear] / inputs[linear] - 1))
        assert np.nanmedian(moved) > 0.01, linear
        nearest, found = folded.errors[linear]
        assert 0 < found < nearest


def test_padding_is_not_observed():
    x = np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    live = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], bool)
    seen = awq.observe(awq.no_inputs(8), jnp.asarray(np.where(live[..., None], x, 1e9)), live)
    rows = np.concatenate([x[0, :3], x[1]])
    np.testing.assert_allclose(seen.gram, rows.T @ rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(seen.magnitude, np.abs(rows).sum(0), rtol=1e-5)


@pytest.mark.slow
def test_hidden_states_pass_layers_as_the_model_does():
    model, frozen, _ = load(TINY, "float32")
    ids, lengths = calibration.token_rows(ROWS, TOKENS)
    assert (np.diff(lengths) <= 0).all() and ids.shape == (24, lengths[0])
    states = HiddenStates(model, np.asarray(frozen["embed_tokens"]), ids, lengths)
    for index in range(model.arch.num_layers):
        states.advance(jax.tree.map(lambda leaf: leaf[index], frozen["layers"]))  # noqa: B023
    expected, _ = jax.jit(model.apply)({"frozen": frozen}, jnp.asarray(ids))
    rows, scale = jnp.asarray(np.stack(states.rows)), frozen["norm"]["scale"]
    actual = layers.rms_norm(rows, scale, model.arch.rms_norm_eps)
    live = np.arange(ids.shape[1]) < lengths[:, None]
    np.testing.assert_allclose(actual[live], expected[live], rtol=1e-4, atol=1e-4)


def written(folder, *rows):
    """Writes rows to a file, and returns a calibration with it."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Calibration(str(path))


def rendered(rows):
    return TOKENS.render(calibration.prompts(rows), add_generation_prompt=False)


def test_rows_are_found_under_the_usual_names(tmp_path):
    hf = AutoTokenizer.from_pretrained(TINY)
    chat = lambda *messages: hf.apply_chat_template(list(messages), tokenize=False)
    user, assistant = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
    turns = [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}]
    system = {"role": "system", "content": "Sum."}
    for row, text in (
        ({"messages": [user]}, chat(user)),
        ({"system": "Sum.", "conversations": turns}, chat(system, user, assistant)),
        ({"text": "2+3=5"}, "2+3=5"),
        ({"problem": "2+3?", "solution": "5"}, chat(user, assistant)),
    ):
        assert rendered(written(tmp_path, row)) == [text]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"weight": 3}, r"row 0: columns: got \['weight'\]; must hold messages"),
        ({"messages": "hello"}, "row 0: messages: got 'hello'; must be a list of messages"),
        ({"text": 3}, "row 0: text: got 3; must be a text"),
        ({"text": ""}, "its texts have no tokens"),
    ],
)
def test_rows_without_texts_are_refused(tmp_path, row, message):
    with pytest.raises(ValueError, match=f"rows.jsonl.*{message}"):
        calibration.token_rows(written(tmp_path, row), TOKENS)


def test_a_row_may_lack_what_other_rows_have_and_errors_name_the_row_of_the_file(tmp_path):
    table = [
        {"messages": [{"role": "user", "content": "A?"}], "text": None, "question": None},
        {"messages": None, "text": "A!", "question": None},
        {"messages": None, "text": None, "question": "A?"},
    ]
    prompts = TOKENS.render([table[0]["messages"]] * 2, add_generation_prompt=False)
    assert sorted(rendered(written(tmp_path, *table))) == sorted([*prompts, "A!"])
    for bad in range(3):
        rows = written(tmp_path, *({"text": 5 if i == bad else "A"} for i in range(3)))
        with pytest.raises(ValueError, match=f"rows.jsonl.*column 'text': .*row {bad} has 5"):
            calibration.prompts(rows)


def test_a_tokenizer_of_another_model_is_refused_before_calibration():
    small = dataclasses.replace(architecture.load(TINY), vocab_size=300)
    message = "has ids up to 42.; the model's embedding has only 300 rows"
    with pytest.raises(ValueError, match=message):
        quantizer._hidden_states(TINY, small, ROWS, lambda line: None)


@pytest.mark.slow
def test_a_killed_calibrated_job_goes_on_to_the_same_bytes(tmp_path, monkeypatch):
    """Hidden states are not stored: they pass again through the layers that are written."""
    monkeypatch.setattr(awq, "GRID", 2)
    recipe = Recipe("nvfp4", "awq", calibration=ROWS)
    whole, out = tmp_path / "whole", tmp_path / "out"
    quantizer.quantize("qerl-tiny", whole, recipe, lambda line: None)
    lines = []

    def stop(line):
        lines.append(line)
        if line.startswith("layer 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantizer.quantize("qerl-tiny", out, recipe, stop)
    assert "of outputs" in lines[-1]
    report = quantizer.quantize("qerl-tiny", out, recipe, lines.append)
    for number in range(1, 5):
        name = f"model-{number:05d}-of-00004.safetensors"
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    for layer in report["layers"]:
        assert all(found <= nearest for nearest, found in layer["outputs"].values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvfp4", "nf4"])
def test_calibration_brings_the_shipped_base_nearer_to_its_16_bits(name, tmp_path):
    reference = load("qerl-tiny", "float32")
    held_out = Calibration("arithmetic", num_samples=192, max_length=256, seed=1000)
    ids, lengths = calibration.token_rows(held_out, TOKENS)
    kls = {}
    for method in ("rtn", "awq"):
        recipe = Recipe(name, method, calibration=Calibration("arithmetic", 256, 256))
        quantizer.quantize("qerl-tiny", tmp_path / method, recipe, lambda line: None)
        kls[method] = mean_kl(reference, load(tmp_path / method, name), ids, lengths)
    assert kls["awq"] < kls["rtn"]
