"""Measures how much packing changes a model: KL(16 bit || packed), of all linears and of each one, in a single pass.

A few rows pass through the 16-bit model layer by layer. At each layer they also pass through it once for each of
its linears, with only that linear packed. These outputs then continue through the 16-bit layers that follow, together
with the outputs from earlier layers. So the device holds one layer, and for each linear the hidden states of a few
hundred tokens.
"""

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.checkpoint import safetensors
from qerl_jax.model import layers
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer
from qerl_jax.quantization.calibration import advance

# Number of calibration rows, and of tokens of each, that are used; a ranking needs no more.
_ROWS, _TOKENS = 4, 128


class Sensitivities:
    """The hidden states of a few rows before a layer, in 16 bits and with each earlier linear packed."""

    def __init__(self, model: Transformer, x: jax.Array, live: jax.Array, folder: pathlib.Path):
        """Starts before the first layer.

        Args:
            model: A dense model, which runs the layers.
            x: Embeddings [S, T, D] of right-padded rows; only the first 4 rows and 128 slots are used.
            live: bool [S, T], which slots are tokens.
            folder: Folder for the results of each layer, so that an interrupted job can continue.
        """
        self._model, self._folder = model, folder
        self._x, self._live = x[:_ROWS, :_TOKENS], live[:_ROWS, :_TOKENS]
        self._packed: dict[tuple[int, str], jax.Array] = {}
        self._fresh: dict[str, jax.Array] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens over which the divergences are averaged."""
        return int(self._live.sum())

    def add(self, linear: str, layer: dict[str, Any], weight: jax.Array) -> None:
        """Runs the layer with another weight in one of its linears.

        Args:
            linear: Name of the fused linear within the layer.
            layer: The dense tree of the layer before packing. It may contain scales that cancel between linears.
            weight: [N, K], the dequantized packed weight.
        """
        changed = layer | {linear: layer[linear] | {"weight": weight}}
        self._fresh[linear] = advance(self._model, changed, self._x)

    def save(self, index: int) -> None:
        """Writes the results of `add` for a layer to the file `sensitivity-<index>.safetensors`."""
        if self._fresh:
            safetensors.write(self._file(index), jax.device_get(self._fresh))

    def restore(self, index: int) -> None:
        """Reads the saved results of a layer, in place of calls of `add`; does nothing if there are none."""
        if self._file(index).is_file():
            saved = safetensors.Tensors(self._folder, self._file(index).stem)
            self._fresh = {linear: jnp.array(x) for linear, x in saved.items()}

    def advance(self, index: int, layer: dict[str, Any]) -> None:
        """Runs a dense layer of the source on all states, except those that `add` made for this layer."""
        self._packed = {at: advance(self._model, layer, x) for at, x in self._packed.items()}
        self._packed |= {(index, linear): x for linear, x in self._fresh.items()}
        self._x, self._fresh = advance(self._model, layer, self._x), {}

    def divergences(self, norm: jax.Array, head: jax.Array) -> dict[tuple[int, str], float]:
        """Computes KL(16 bit || this linear packed), the mean per token in nats; call it after the last layer.

        Args:
            norm: The scale [D] of the last norm.
            head: The matrix [V, D] of the LM head.

        Returns:
            The divergences by (layer, fused linear).
        """
        arch = self._model.arch
        divergence = lambda x: _divergence(arch, (self._x, x), self._live, norm, head)
        divergences = {at: divergence(x) for at, x in self._packed.items()}
        return {at: float(kl) for at, kl in jax.device_get(divergences).items()}

    def _file(self, index: int) -> pathlib.Path:
        return self._folder / f"sensitivity-{index:05d}.safetensors"


class Divergence:
    """KL(16 bit || packed) of the whole model on a few rows, which pass through both models layer by layer."""

    def __init__(self, model: Transformer, x: jax.Array, live: jax.Array):
        """Starts before the first layer.

        Args:
            model: A dense model, which runs the layers.
            x: Embeddings [S, T, D] of right-padded rows.
            live: bool [S, T], the slots that count.
        """
        self.model, self._both, self._live = model, (x, x), live

    @property
    def tokens(self) -> int:
        """Number of tokens over which the divergence is averaged."""
        return int(self._live.sum())

    def advance(self, layer: dict[str, Any], packed: dict[str, Any]) -> None:
        """Runs the next layer of both models: dense trees, the second of the dequantized weights."""
        pairs = zip((layer, packed), self._both, strict=True)
        self._both = tuple(advance(self.model, tree, x) for tree, x in pairs)

    def mean(self, norm: jax.Array, head: jax.Array) -> float:
        """Returns the mean per token in nats after the last layer; arguments as for `Sensitivities.divergences`."""
        return float(_divergence(self.model.arch, self._both, self._live, norm, head))


@functools.partial(jax.jit, static_argnums=0)
def _divergence(arch, both, live, norm, head) -> jax.Array:
    def of_row(row):
        *hidden, live = row
        logps, others = (
            jax.nn.log_softmax(layers.logits(layers.rms_norm(x, norm, arch.rms_norm_eps), head))
            for x in hidden
        )
        return jnp.where(live, jnp.sum(jnp.exp(logps) * (logps - others), axis=-1), 0).sum()

    return jnp.sum(jax.lax.map(of_row, (*both, live))) / jnp.sum(live)


def table(arch: Architecture, divergences: dict[tuple[int, str], float], tokens: int) -> list[str]:
    """Returns the ten linears whose packing changes the model most, as a table; no lines if none was measured."""
    if not divergences:
        return []
    text = [
        f"most sensitive: KL(16 bit || only this linear packed) per token, mean of {tokens}, and",
        "MB more for 16 bits; --keep NAME ... leaves linears in 16 bits",
    ]
    for (index, linear), kl in sorted(divergences.items(), key=lambda item: -item[1])[:10]:
        (first, *_), parts = arch.linear_names(linear, index), arch.linears()[linear]
        name = first.rpartition(".")[0] + "." + "/".join(part for part, _ in parts)
        text.append(f"  {name:<56} {kl:.2e}  {arch.linear_size(linear) * 1.4375 / 1e6:8.2f}")
    return text
