"""Records tests/golden/smollm2: `python -m scripts.record_smollm2 FOLDER` with a folder of `make_smollm2`.

It needs an interpreter with torch and transformers, and minutes on a CPU:

    pip install torch==2.13.0 transformers==5.23.0 jinja2
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib

GOLDEN = pathlib.Path(__file__).parents[1] / "tests/golden/smollm2"
NEW_TOKENS = 24
# Two float32 implementations differ by about 1e-5, so the winning token must have at least this margin.
CLEAR = 5e-3

_STORY = (
    "On Monday the baker Ines opened her shop at six in the morning, as she did on every day of the week but "
    "Sunday. The first visitor was an old fisherman who bought two loaves of rye bread and told her that the "
    "wind would turn before noon. At eight the children of the school came for rolls, and at nine the mayor "
    "asked for a cake with candles, because his daughter would be seven years old on Thursday. Ines wrote "
    "the order into her red book. At noon the wind did turn, and rain kept everyone at home, so that she "
    "closed early, swept the floor, and baked the cake three days too soon."
)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CHATS = (
    [_user("What is the capital of France? Answer in one sentence.")],
    [_system("Answer with a number."), _user("What is 7 + 5?")],
    [_system(""), _user("Name three colours of the rainbow.")],
    [
        _user("My name is Ada and I live in Turin."),
        _assistant("Nice to meet you, Ada! How is the weather in Turin?"),
        _user("It is raining. What is my name?"),
    ],
    [
        _system("You are a patient teacher of arithmetic."),
        _user("Tom has 12 marbles and buys 30 more. How many does he have?"),
        _assistant("Tom has 12 + 30 = 42 marbles."),
        _user("He then gives away 2. How many are left?"),
    ],
    [_user(f"Read this story, then say what Ines baked and for whom.\n\n{_STORY}")],
    [_user("Où se trouve la tour Eiffel ? Réponds en français, s'il te plaît.")],
    [_user("Translate into English: 春が来た。桜の花が咲いています 🌸")],
    [
        _user(
            "Write a Python function that returns the square of x:\n```python\ndef square(x):\n```"
        )
    ],
    [_user("What is 128 * 4 - 1,000.5?\tShow   each step.\n\n")],
)


def main() -> None:
    """Writes golden.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()

    import tokenizers
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, attn_implementation="eager"
    )
    rows = [record(model, tokenizer, chat) for chat in CHATS]
    least = min(row.pop("least_margin") for row in rows)
    if least < CLEAR:
        raise SystemExit(
            f"a best token is only {least:.2g} ahead of the second: take another prompt"
        )
    table = {
        "model": "SmolLM2-135M-Instruct",
        "sha256": {
            name: hashlib.sha256((args.folder / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
        },
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
        "dtype": "float32",
        "least_margin": round(least, 4),
        "rows": rows,
    }
    GOLDEN.mkdir(parents=True, exist_ok=True)
    text = json.dumps(table, indent=1, ensure_ascii=False)
    (GOLDEN / "golden.json").write_text(_lists_on_one_line(text) + "\n", encoding="utf-8")


def record(model, tokenizer, chat: list[dict[str, str]]) -> dict:
    """Token ids of a chat, its greedy continuation, and the log-probabilities of that from one forward pass."""
    import torch

    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        whole = model.generate(
            torch.tensor([ids]), do_sample=False, max_new_tokens=NEW_TOKENS, use_cache=True
        )
        logps = torch.log_softmax(model(whole).logits[0, len(ids) - 1 : -1], dim=-1)
    tokens = whole[0, len(ids) :]
    best = logps.topk(2, dim=-1)
    if not torch.equal(best.indices[:, 0], tokens):
        raise SystemExit("the cached and the whole forward pass disagree: take another prompt")
    return {
        "chat": chat,
        "prompt_ids": list(ids),
        "tokens": tokens.tolist(),
        "logps": [float(f"{value:.8g}") for value in best.values[:, 0].tolist()],
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "least_margin": float((best.values[:, 0] - best.values[:, 1]).min()),
    }


def _lists_on_one_line(text: str) -> str:
    """Formats JSON with each list of numbers on one line."""
    lines, inside = [], False
    for line in text.splitlines():
        stripped = line.strip()
        if inside:
            lines[-1] += stripped if stripped.startswith("]") else stripped.replace(",", ", ")
            inside = not stripped.startswith("]")
        else:
            lines.append(line)
            inside = stripped.endswith(('_ids": [', '"tokens": [', '"logps": ['))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
