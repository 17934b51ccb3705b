"""Makes the tokenizer of the tiny quickstart base: byte-level BPE over arithmetic problems.

Each digit is a token. The reasoning tags are ordinary added tokens: they survive `skip_special_tokens`, and rewards
find them in the decoded text. The chat marks are special. Text (in Unicode's form C) decodes to itself: every byte has
a token.

    python -m scripts.make_tiny_tokenizer [folder]
"""

import json
import pathlib
import re
import sys
from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from qerl_jax.data import arithmetic

FOLDER = pathlib.Path(__file__).parents[1] / "qerl_jax" / "assets" / "tiny"
VOCABULARY_LIMIT = 512
NUM_PROBLEMS = 20_000
SEED = 0
CHAT_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# If a config.json of this architecture is beside the file, transformers replaces the file's normalization (NFC) and
# splitting with Qwen2's. So the file has the same ones.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def texts() -> Iterator[str]:
    """The training text: questions, the work of their answers, and the words of a chat."""
    for index in range(NUM_PROBLEMS):
        problem = arithmetic.problem("train", SEED, index)
        yield problem.question
        yield re.sub("|".join(TAGS), "", arithmetic.worked_answer(problem))
        yield from ("Easy.", "system\n", "user\n", "assistant\n")


def make_tokenizer() -> tokenizers.Tokenizer:
    """Trains the tokenizer. The same text gives the same tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT - len(CHAT_MARKS) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in CHAT_MARKS])
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def main() -> None:
    """Writes tokenizer.json and tokenizer_config.json into the folder."""
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "padding_side": "left",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()
