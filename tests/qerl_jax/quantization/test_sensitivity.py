"""Tests the divergence caused by packing one linear, against the whole model with that linear replaced."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import ModelConfig
from qerl_jax.data import arithmetic
from qerl_jax.model import layers
from qerl_jax.model.transformer import head
from qerl_jax.quantization import quantizer, sensitivity

LINEARS = ("qkv", "down")


@pytest.fixture(scope="module")
def base():
    cfg = ModelConfig("qerl-tiny", weights="float32", dtype="float32")
    model, frozen, _ = load_base(cfg, None)
    return model, frozen


def changed(weight):
    """Returns another weight of the same shape."""
    return weight + 0.02 * jnp.sin(jnp.arange(weight.size, dtype=jnp.float32)).reshape(weight.shape)


def walk(model, frozen, ids, live, folder, stop_after=None):
    """Passes all layers, and on request starts again from the state that was kept after one of them."""
    begin = lambda: sensitivity.Sensitivities(model, frozen["embed_tokens"][ids], live, folder)
    probe = begin()
    for index in range(model.arch.num_layers):
        layer = jax.tree.map(lambda x, i=index: x[i], frozen["layers"])
        for linear in LINEARS:
            probe.add(linear, layer, changed(layer[linear]["weight"]))
        probe.save(index)
        probe.advance(index, layer)
        if index == stop_after:
            probe = begin()
            for earlier in range(index + 1):
                probe.restore(earlier)
                probe.advance(earlier, jax.tree.map(lambda x, i=earlier: x[i], frozen["layers"]))
    return probe.divergences(frozen["norm"]["scale"], head(frozen))


def logps(model, frozen, ids):
    hidden, _ = model.apply({"frozen": frozen}, ids)
    return jax.nn.log_softmax(layers.logits(hidden, head(frozen)))


@pytest.mark.slow
def test_it_is_that_of_the_whole_model_with_one_linear_replaced(base, tmp_path):
    model, frozen = base
    rng = np.random.default_rng(0)
    ids = rng.integers(0, model.arch.vocab_size, (3, 20))
    live = np.arange(20) < np.array([20, 7, 13])[:, None]
    found = walk(model, frozen, ids, live, tmp_path)
    assert set(found) == {(i, name) for i in range(model.arch.num_layers) for name in LINEARS}
    expected = logps(model, frozen, ids)
    for (index, linear), kl in found.items():
        stack = frozen["layers"][linear]["weight"]
        one = {linear: {"weight": stack.at[index].set(changed(stack[index]))}}
        merged = {name: leaves | one.get(name, {}) for name, leaves in frozen["layers"].items()}
        other = logps(model, frozen | {"layers": merged}, ids)
        each = jnp.sum(jnp.exp(expected) * (expected - other), axis=-1)
        assert kl == pytest.approx(float(each[live].mean()), rel=1e-3)


def test_a_job_that_was_stopped_finds_the_same(base, tmp_path):
    model, frozen = base
    ids, live = np.arange(12).reshape(2, 6), np.ones((2, 6), bool)
    whole = walk(model, frozen, ids, live, tmp_path)
    assert walk(model, frozen, ids, live, tmp_path, stop_after=1) == whole


def test_the_table_names_what_hurts_most(base):
    arch = base[0].arch
    found = {(0, "qkv"): 1e-3, (2, "down"): 2e-2}
    lines = sensitivity.table(arch, found, 512)
    assert "mean of 512" in lines[0]
    assert [line.split()[:2] for line in lines[2:]] == [
        ["model.layers.2.mlp.down_proj", "2.00e-02"],
        ["model.layers.0.self_attn.q_proj/k_proj/v_proj", "1.00e-03"],
    ]
    assert sensitivity.table(arch, {}, 0) == []


@pytest.mark.slow
def test_the_divergence_of_a_quantized_folder_is_that_of_the_two_models(base, tmp_path):
    model, frozen = base
    recipe = quantizer.Recipe(block_scales="maximum")
    lines = []
    report = quantizer.quantize("qerl-tiny", tmp_path / "out", recipe, lines.append)
    cfg = ModelConfig(str(tmp_path / "out"), weights="nvfp4", dtype="float32")
    packed_model, packed, tokens = load_base(cfg, None)
    rows, where = [], []
    for index in range(16):
        problem = arithmetic.problem("test", 0, index)
        (question,) = tokens.encode([[{"role": "user", "content": problem.question}]])
        (answer,) = tokens.ids([arithmetic.worked_answer(problem)], add_special_tokens=False)
        rows.append(question + answer)
        where.extend((index, len(question) - 1 + slot) for slot in range(len(answer)))
    ids = np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in rows])
    both = logps(model, frozen, ids), logps(packed_model, packed, ids)
    ours, theirs = (np.asarray(x, np.float64)[*np.transpose(where)] for x in both)
    expected = np.sum(np.exp(ours) * (ours - theirs)) / len(where)
    assert report["kl"] == pytest.approx(expected, rel=1e-3) and expected > 1e-4
    line = f"KL(16 bit || nvfp4) is {report['kl']:.2g} a token, the mean of {len(where)} of"
    assert any(text.startswith(line) for text in lines)
