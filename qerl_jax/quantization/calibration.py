"""Calibration texts, and their hidden states layer by layer."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.data import arithmetic, datasets, tokenizer
from qerl_jax.model.transformer import Transformer, run_layer
from qerl_jax.quantization import awq
from qerl_jax.system.checked import Checked, Count, Seed, require, require_unicode

# The calibration data of the QeRL paper.
DATASET = "open-thoughts/OpenThoughts-114k"

# Functions that make a procedural problem, and its answer.
_ARITHMETIC = {
    "arithmetic": (arithmetic.problem, arithmetic.worked_answer),
    "arithmetic-mixed": (arithmetic.mixed, arithmetic.plain_answer),
}
# Number of tokens that pass through a layer at a time.
_CHUNK = 8192
_QUESTIONS = ("question", "problem", "prompt", "instruction")
_ANSWERS = ("solution", "answer", "response", "completion", "output")


@dataclasses.dataclass(frozen=True)
class Calibration(Checked):
    """The calibration data.

    Attributes:
        dataset: "arithmetic", "arithmetic-mixed" (the problems of `data.name = "mixed"`, with answers), a set with a
            short name (docs/data.md#a-data-set-from-the-hub), a data set of the hub, a folder, or a .jsonl, .json
            or .parquet file. Its rows have messages (`messages` or `conversations`), a `text`, or a question and
            an answer under the usual names.
        num_samples: Number of rows to use, chosen at random.
        max_length: Maximum number of tokens of a row; longer rows are truncated.
        seed: Random seed for choosing the rows.
    """

    dataset: str = DATASET
    num_samples: Count = 256
    max_length: Count = 2048
    seed: Seed = 0


def prompts(cfg: Calibration) -> list[tokenizer.Prompt]:
    """Returns the rows as texts and chats.

    Raises:
        ValueError: If the data set cannot be loaded, or a row has none of the columns.
    """
    if cfg.dataset in _ARITHMETIC:
        draw, answer = _ARITHMETIC[cfg.dataset]
        problems = [draw("train", cfg.seed, index) for index in range(cfg.num_samples)]
        rows = [{"question": problem.question, "answer": answer(problem)} for problem in problems]
        order = range(len(rows))
    else:
        dataset = datasets.load_rows(cfg.dataset, None, None, "train")
        order = np.random.default_rng(cfg.seed).permutation(len(dataset))[: cfg.num_samples]
        rows = [dataset[int(index)] for index in order]
    numbered = zip(order, rows, strict=True)
    return [_chat(row, f"{cfg.dataset}, row {index}") for index, row in numbered]


def token_rows(cfg: Calibration, tokens: tokenizer.Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows as right-padded ids, int32 [S, T], and their lengths, int32 [S]; the longest row is first.

    Raises:
        ValueError: As for `prompts`, or if no text has a token, or there is a chat and no chat template.
    """
    encoded = tokens.encode(prompts(cfg), add_generation_prompt=False)
    require(any(encoded), "calibration data set", cfg.dataset, "its texts have no tokens")
    encoded = sorted((ids[: cfg.max_length] for ids in encoded), key=len, reverse=True)
    rows = [ids + [tokens.pad_token] * (len(encoded[0]) - len(ids)) for ids in encoded]
    return np.array(rows, np.int32), np.array([len(ids) for ids in encoded], np.int32)


def worked_answers(count: int, tokens: tokenizer.Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Returns procedural problems with worked answers as right-padded ids, int32 [S, T], and bool [S, T].

    The second array marks the slots that predict a token of an answer. Questions are chats if there is a template.
    """
    problems = [arithmetic.problem("test", 0, index) for index in range(count)]
    texts: list[tokenizer.Prompt] = [f"{problem.question}\n" for problem in problems]
    if tokens.chat_template:
        texts = [[{"role": "user", "content": problem.question}] for problem in problems]
    answers = tokens.ids([*map(arithmetic.worked_answer, problems)], add_special_tokens=False)
    rows = [*zip(tokens.encode(texts), answers, strict=True)]
    width = max(len(question) + len(answer) for question, answer in rows)
    ids, live = np.full((count, width), tokens.pad_token, np.int32), np.zeros((count, width), bool)
    for number, (question, answer) in enumerate(rows):
        first, end = len(question), len(question) + len(answer)
        ids[number, :end] = question + answer
        live[number, first - 1 : end - 1] = True
    return ids, live


class HiddenStates:
    """The hidden states of all calibration rows before a layer, in host memory; `advance` moves them to the next."""

    def __init__(self, model: Transformer, embedding: np.ndarray, ids: np.ndarray, lengths):
        """Starts before the first layer.

        Args:
            model: A dense model, which runs the layers.
            embedding: [V, D]; may be memory-mapped.
            ids: int32 [S, T], right-padded.
            lengths: int32 [S].
        """
        self.model, self._lengths = model, lengths
        self.rows = [np.asarray(embedding[row], model.dtype) for row in ids]
        self._together = max(1, _CHUNK // ids.shape[1])

    def observe(self, layer: dict[str, Any]) -> dict[str, awq.Inputs]:
        """Computes statistics of the inputs of each fused linear of a layer (a dense tree)."""
        arch = self.model.arch
        seen = {name: awq.no_inputs(arch.input_width(name)) for name in arch.linears()}
        for x, live, _ in self._batches():
            seen = _observe(self.model, layer, x, live, seen)
        return seen

    def advance(self, layer: dict[str, Any]) -> None:
        """Runs a layer (a dense tree) on the hidden states, and replaces them by its outputs."""
        for x, _, first in self._batches():
            passed = np.asarray(advance(self.model, layer, x))
            self.rows[first : first + len(x)] = passed[: len(self.rows) - first]

    def sample(self) -> tuple[jax.Array, jax.Array]:
        """Returns the first batch of rows, [B, T, D], and which of its slots are tokens, bool [B, T]."""
        x, live, _ = next(self._batches())
        return jnp.asarray(x), jnp.asarray(live)

    def _batches(self):
        slots = np.arange(len(self.rows[0]))
        for first in range(0, len(self.rows), self._together):
            rows = self.rows[first : first + self._together]
            # The last batch is padded with rows of zeros, so that only one shape is compiled.
            fill = self._together - len(rows)
            lengths = np.pad(self._lengths[first : first + len(rows)], (0, fill))
            x = np.stack(rows + [np.zeros_like(rows[0])] * fill)
            yield x, slots < lengths[:, None], first


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _observe(model, layer, x, live, seen):
    inputs = run_layer(model, layer, x)[1]
    return {name: awq.observe(seen[name], inputs[name], live) for name in seen}


@functools.partial(jax.jit, static_argnums=0)
def advance(model: Transformer, layer: dict[str, Any], x: jax.Array) -> jax.Array:
    """Returns the hidden states [B, T, D] after a dense layer; compiled."""
    return run_layer(model, layer, x)[0]


def _chat(row: Mapping[str, Any], where: str) -> tokenizer.Prompt:
    # In a data set with rows of several kinds, the columns of the other kinds are None.
    row = tokenizer.without_none(row)
    require_unicode(row, where)
    for column in ("messages", "conversations"):
        if column in row:
            system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
            chat = row[column]
            holds = isinstance(chat, Sequence) and all(isinstance(entry, Mapping) for entry in chat)
            require(holds, f"{where}: {column}", chat, "must be a list of messages")
            return system + [_message(message) for message in chat]
    if "text" in row:
        require(isinstance(row["text"], str), f"{where}: text", row["text"], "must be a text")
        return row["text"]
    question, answer = (
        next((row[name] for name in names if isinstance(row.get(name), str)), None)
        for names in (_QUESTIONS, _ANSWERS)
    )
    rule = f"must hold messages, conversations, or a text as text or {', '.join(_QUESTIONS)}"
    require(question is not None, f"{where}: columns", sorted(row), rule)
    messages = [{"role": "user", "content": question}]
    return messages + ([] if answer is None else [{"role": "assistant", "content": answer}])


def _message(message: tokenizer.Message) -> tokenizer.Message:
    # Accepts ShareGPT's field names besides the usual ones.
    role = message.get("role") or message.get("from")
    role = {"human": "user", "gpt": "assistant"}.get(role, role)
    content = message.get("content") or message.get("value") or ""
    others = {name: value for name, value in message.items() if name not in ("from", "value")}
    return others | {"role": role, "content": content}
