"""Tests the base of the study: its training data, and the effect of noise on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn import schedule as aqn
from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.data import arithmetic, tokenizer
from qerl_jax.model.transformer import noise_shapes
from scripts import study_start, warm_up


def test_the_worked_answers_and_their_stop_tokens_are_what_the_warm_up_learns():
    tokens = tokenizer.load(TINY)
    rows = warm_up.examples(tokens, seed=3, count=12)
    for index, (ids, live) in enumerate(zip(rows.ids, rows.live, strict=True)):
        *answer, stop = ids[live]
        problem = arithmetic.mixed("train", 3, index)
        assert tokens.decode(answer) == arithmetic.plain_answer(problem)
        assert stop == tokens.stop_tokens[0]
        # What comes before the answer is the question as the policy is asked.
        chat = tokens.encode([warm_up.asked(problem.question)])[0]
        assert ids[: np.argmax(live)].tolist() == list(chat)
    again = warm_up.examples(tokens, seed=3, count=12)
    np.testing.assert_array_equal(rows.ids, again.ids)


def test_kinds_of_problems():
    kinds = [warm_up.kind(arithmetic.mixed("test", 0, index)) for index in range(40)]
    assert kinds.count("one digit") == 6 and kinds.count("products") == 4
    assert kinds.count("two digits") == 12
    assert kinds.count("2 steps") + kinds.count("3 steps") == 18


@pytest.mark.slow
def test_norms_with_noise_in_them_are_what_aqn_samples_under():
    model, base, _ = study_start.load("qerl-tiny", "bfloat16")
    noise = aqn.norm_noise(jax.random.key(1), 1e-2, noise_shapes(model.arch))
    ids = np.arange(20)[None]
    noisy, _ = model.apply({"frozen": base, "noise": noise}, ids)
    ours, _ = model.apply({"frozen": study_start.added(base, noise)}, ids)
    clean, _ = model.apply({"frozen": base}, ids)
    np.testing.assert_array_equal(ours, noisy)
    assert float(jnp.abs(noisy - clean).max()) > 1e-3
