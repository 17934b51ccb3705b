"""Two prompts with two completions each: what attention sees, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.model.prompt_sharing import SharedPrompts

# Tokens are numbers: prompts 1 2 and 5 6 7, their completions 3 4 / 13 14 and 8 9 / 18 19. 0 pads.
SHARED = SharedPrompts(jnp.array([2, 3]), width=3, branches=2)
ROWS = jnp.array([[1, 2, 0, 3, 4, 13, 14], [5, 6, 7, 8, 9, 18, 19]], jnp.float32)[..., None]
SPANS = [[1, 2, 3, 4, 0], [1, 2, 13, 14, 0], [5, 6, 7, 8, 9], [5, 6, 7, 18, 19]]


def test_a_span_is_a_prompt_and_one_of_its_completions_without_a_gap():
    assert SHARED.unfold(ROWS)[..., 0].tolist() == SPANS


def test_folding_brings_every_real_token_back_to_its_place():
    folded = SHARED.fold(SHARED.unfold(ROWS))[..., 0]
    # Where the first prompt was padded stands the first completion's first token: never looked at.
    assert folded.tolist() == ROWS.at[0, 2, 0].set(3)[..., 0].tolist()


def test_rows_join_from_their_parts():
    prompts, completions = SHARED.part(ROWS)
    assert completions[..., 0].tolist() == [[3, 4], [13, 14], [8, 9], [18, 19]]
    np.testing.assert_array_equal(SHARED.join(prompts, completions), ROWS)


def test_the_first_token_of_a_completion_is_predicted_by_its_prompts_last():
    assert SHARED.before(ROWS)[..., 0].tolist() == [[2, 3], [2, 13], [7, 8], [7, 18]]


def test_slopes_of_a_prompts_values_add_up_over_its_completions():
    weights = jnp.arange(1.0, 21).reshape(4, 5, 1)
    slopes = jax.grad(lambda rows: jnp.sum(weights * SHARED.unfold(rows)))(ROWS)[..., 0]
    assert slopes.tolist() == [
        [1 + 6, 2 + 7, 0, 3, 4, 8, 9],
        [11 + 16, 12 + 17, 13 + 18, 14, 15, 19, 20],
    ]


def test_slopes_go_back_through_folding():
    weights = jnp.arange(1.0, 15).reshape(2, 7, 1)
    slopes = jax.grad(lambda spans: jnp.sum(weights * SHARED.fold(spans)))(
        jnp.array(SPANS, jnp.float32)[..., None]
    )[..., 0]
    # Of spans that are not the first, only the completion comes back.
    assert slopes.tolist() == [
        [1, 2, 3 + 4, 5, 0],
        [0, 0, 6, 7, 0],
        [8, 9, 10, 11, 12],
        [0, 0, 0, 13, 14],
    ]
