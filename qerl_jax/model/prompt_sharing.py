"""Rows that share a prompt: [prompt | completion 1 | ... | completion g] instead of g rows that each begin with it.

Everything that looks at one token at a time (linears, norms, adapters) runs on the prompt once.
Attention looks at g spans [prompt, completion], which `unfold` puts together without a gap, so that
it is the plain causal attention of any other rows; `fold` goes back.
"""

import dataclasses

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SharedPrompts:
    """How P rows of width Tp + g * C stand for P * g spans of width Tp + C.

    Attributes:
        lengths: int32 [P], real tokens of each prompt, which is right-padded.
        width: Tp, slots that a prompt takes.
        branches: g, completions of each prompt.
    """

    lengths: jax.Array
    width: int = dataclasses.field(metadata={"static": True})
    branches: int = dataclasses.field(metadata={"static": True})

    def join(self, prompts: jax.Array, completions: jax.Array) -> jax.Array:
        """Prompts [P, Tp, ...] and completions [P * g, C, ...] as rows [P, Tp + g * C, ...]."""
        rest = completions.reshape(len(prompts), -1, *completions.shape[2:])
        return jnp.concatenate([prompts, rest], axis=1)

    def part(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The inverse of `join`."""
        prompts, rest = jnp.split(rows, [self.width], axis=1)
        length = rest.shape[1] // self.branches
        return prompts, rest.reshape(len(rows) * self.branches, length, *rest.shape[2:])

    def unfold(self, rows: jax.Array) -> jax.Array:
        """[P, Tp + g * C, N] -> spans [P * g, Tp + C, N]: the completion follows its prompt's last real token."""
        prompts, completions = self.part(rows)
        length = completions.shape[1]
        lengths = jnp.repeat(self.lengths, self.branches)
        front = jnp.repeat(_pad(prompts, length), self.branches, axis=0)
        back = _rotate(_pad(completions, self.width), lengths)
        real = jnp.arange(self.width + length) < lengths[:, None]
        return jnp.where(real[..., None], front, back)

    def fold(self, spans: jax.Array) -> jax.Array:
        """The inverse of `unfold`, but for slots of padding; a prompt's values are those of its first span."""
        lengths = jnp.repeat(self.lengths, self.branches)
        completions = _rotate(spans, -lengths)[:, : spans.shape[1] - self.width]
        return self.join(spans[:: self.branches, : self.width], completions)

    def before(self, rows: jax.Array) -> jax.Array:
        """[P, Tp + g * C, D] -> [P * g, C, D]: of each completion token the state before it, which predicts it."""
        prompts, completions = self.part(rows)
        last = jnp.take_along_axis(prompts, self.lengths[:, None, None] - 1, axis=1)
        return jnp.concatenate(
            [jnp.repeat(last, self.branches, axis=0), completions[:, :-1]], axis=1
        )


def _pad(x: jax.Array, slots: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, slots), (0, 0)))


@jax.custom_vjp
def _rotate(x: jax.Array, by: jax.Array) -> jax.Array:
    """Row b of [B, T, N] moved `by[b]` slots to the right, what falls off coming in at the left.

    A permutation, so its derivative is the way back: a gather, where that of indexing would be an
    addition into scattered places.
    """
    slots = (jnp.arange(x.shape[1]) - by[:, None]) % x.shape[1]
    return jax.vmap(lambda row, s: row.at[s].get(mode="promise_in_bounds"))(x, slots)


_rotate.defvjp(lambda x, by: (_rotate(x, by), by), lambda by, dy: (_rotate(dy, -by), None))
