"""Feeds damaged and hostile input to everything that reads foreign data: `python -m tests.faults.fuzz`.

    python -m tests.faults.fuzz --only answers --input 4711    one input again, with its traceback

A fault is an error that `qerl` would show as a traceback, more processor time than the target's limit, or an action that
no reader should do, as `fuzz_watch` sees it. The exit status is 1 if there were faults. A new target is a row of `TARGETS`.
"""

import argparse
import atexit
import codecs
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from qerl_jax import config
from qerl_jax.checkpoint import gguf, packed_formats, peft, safetensors
from qerl_jax.cli import crashes, generate
from qerl_jax.data import answers, chat_template, latex_form, verl_answers
from qerl_jax.model import architecture
from qerl_jax.rewards import stock
from qerl_jax.system import process_pool
from qerl_jax.tools import tool_calls
from qerl_jax.tracking import logger
from tests import gguf_files
from tests.faults import fuzz_watch, harness

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Target:
    """Something that reads foreign data: `make` makes an input, `prepare` the argument of `feed` from it, unwatched.

    Reading may take so many processor seconds, cause the events `does` of `sys.audit`, and, if `may_refuse`, refuse an
    input with an error that the command line shows as one line.
    """

    make: Callable[[random.Random], Any]
    feed: Callable[[Any], None]
    prepare: Callable[[Any], Any] = lambda made: made
    count: int = 100_000
    seconds: float = 2.0
    may_refuse: bool = True
    does: tuple[str, ...] = ()


@dataclasses.dataclass
class Result:
    """How many inputs were read, the most processor seconds that one took, and the faults by input number."""

    read: int = 0
    slowest: float = 0.0
    faults: dict[int, str] = dataclasses.field(default_factory=dict)


def trial(name: str, target: Target, seed: int, numbers: Sequence[int]) -> Result:
    """Feeds the inputs with these numbers to a target; each is a function of seed, name and number."""
    result = Result()
    for encoding in "utf-8-sig utf-16 utf-16-le utf-16-be utf-32 utf-32-le utf-32-be".split():
        codecs.lookup(encoding)  # imported when JSON in it is read
    with _clock():
        for number in range(20):  # imports everything that is imported late
            _feed(target, target.prepare(target.make(random.Random(f"first {number}"))))
        for number in numbers:
            content = target.prepare(target.make(random.Random(f"{seed}/{name}/{number}")))
            begun = time.process_time()
            fault, is_read = _feed(target, content)
            spent = time.process_time() - begun
            result.read += is_read and fault is None
            result.slowest = max(result.slowest, spent)
            if spent > target.seconds and fault is None:
                fault = f"took {spent:.1f} s of the processor"
            if fault is not None:
                result.faults[number] = fault
    return result


def _feed(target: Target, content: Any) -> tuple[str | None, bool]:
    """Feeds one input. Returns its fault or None, and whether it was read."""
    watch = _watch(target.does)
    watch.seen.clear()
    signal.setitimer(signal.ITIMER_PROF, 2 * target.seconds)
    fault, is_read = None, False
    try:
        with watch:
            target.feed(content)
        is_read = True
    except _Late:
        fault = f"was not finished after {2 * target.seconds} s of the processor"
    except Exception as error:
        if not (target.may_refuse and crashes.is_expected(error)):
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {str(error)[:200]}"
            fault = f"{said} ({pathlib.Path(where.filename).name}:{where.lineno})"
        elif not 0 < len(crashes.in_one_line(error)) < 10_000:
            fault = f"an error message of {len(str(error))} characters"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return fault or (f"did {watch.seen[0]}" if watch.seen else None), is_read


class _Late(BaseException):
    """The processor time for an input is over."""


@contextlib.contextmanager
def _clock() -> Iterator[None]:
    """Lets the timer of `_feed` end an input that takes too long. It cannot interrupt C code."""

    def late(*_):
        raise _Late

    before = signal.signal(signal.SIGPROF, late)
    try:
        yield
    finally:
        signal.signal(signal.SIGPROF, before)


@functools.cache
def _folder() -> pathlib.Path:
    """A folder for inputs, in memory if the machine has one there."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = tempfile.TemporaryDirectory(dir=memory)
    atexit.register(folder.cleanup)
    return pathlib.Path(folder.name)


@functools.cache
def _watch(allowed: tuple[str, ...]) -> fuzz_watch.Watch:
    return fuzz_watch.Watch((str(_folder()), sys.prefix, sys.base_prefix, str(ROOT)), allowed)


# Words that readers know; in the file a pair is a word and how often it is repeated.
_WORDS: dict[str, list[Any]] = {
    name: [word if isinstance(word, str) else word[0] * word[1] for word in words]
    for name, words in json.loads((ROOT / "tests/faults/fuzz_words.json").read_text()).items()
}
for _name in ("toml", "safetensors", "json", "rows"):
    _WORDS[_name] = [word.encode("latin-1") for word in _WORDS[_name]]


def changed(rng: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    """Makes one to eight changes to bytes: flipped bits, cuts, copies, long repeats, and words that readers know."""
    for _ in range(rng.choice((1, 1, 2, 3, 8))):
        start = rng.randrange(len(data) + 1)
        end = min(len(data), start + rng.choice((1, 1, 4, 16, 256)))
        piece = data[start:end]
        kind = rng.randrange(8)
        if kind == 0 and piece:
            piece = bytes([piece[0] ^ 1 << rng.randrange(8)]) + piece[1:]
        elif kind == 1:
            piece = b""
        elif kind == 2:
            piece = piece * rng.choice((2, 3, 50))
        elif kind == 3:
            piece = rng.choice(words)
        elif kind == 4:
            piece += rng.choice(words)
        elif kind == 5:
            piece = rng.randbytes(rng.choice((1, 4, 8)))
        elif kind == 6:
            data = data[:end]
        else:
            again = rng.randrange(len(data) + 1)
            piece += data[again : again + rng.choice((1, 8, 64))]
        data = data[:start] + piece + data[end:]
    if rng.random() < 0.002:
        data += rng.choice(words) * 10 ** rng.randrange(2, 5)
    return data


def _written(files: dict[str, bytes]) -> pathlib.Path:
    """Writes files into the empty folder. Returns the path of the first."""
    for path in _folder().iterdir():
        path.unlink()
    for name, data in files.items():
        (_folder() / name).write_bytes(data)
    return _folder() / next(iter(files))


_CONFIGS = [path.read_bytes() for path in sorted((ROOT / "configs").rglob("*.toml"))]


def _make_config(rng: random.Random) -> dict[str, bytes]:
    lines = rng.choice(_CONFIGS).split(b"\n")
    # Lines are left out, added or changed at random, such that the rest is often valid TOML.
    if rng.random() < 0.5:
        lines = [line for line in lines if rng.random() > 0.1]
    if rng.random() < 0.3:
        place = rng.randrange(len(lines) + 1)
        field, _, _ = rng.choice(lines).partition(b"=")
        lines[place:place] = [field + b"=" + rng.choice(_WORDS["toml"])]
        return {"run.toml": b"\n".join(lines)}
    return {"run.toml": changed(rng, b"\n".join(lines), _WORDS["toml"])}


@functools.cache
def _safetensors() -> tuple[dict[str, bytes], ...]:
    """Folders with one file, with a file of many types, and with shards and an index."""
    rng = np.random.default_rng(0)
    plain = {"a.weight": rng.normal(size=(3, 4)).astype(np.float32), "b": np.zeros((0, 2), np.int8)}
    types = (np.float64, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.bool_)
    many = {f"t{i}": np.ones((2, 3, i), dtype) for i, dtype in enumerate(types)}
    folders = []
    for tensors, shard_bytes in ((plain, 1 << 40), (many, 1 << 40), (plain | many, 50)):
        with tempfile.TemporaryDirectory() as folder:
            table = {name: (x.dtype, x.shape) for name, x in tensors.items()}
            safetensors.write_shards(folder, table, tensors.__getitem__, shard_bytes=shard_bytes)
            folders.append({p.name: p.read_bytes() for p in sorted(pathlib.Path(folder).iterdir())})
    return tuple(folders)


def _make_safetensors(rng: random.Random) -> dict[str, bytes]:
    files = dict(rng.choice(_safetensors()))
    name = rng.choice(list(files))
    data = files[name]
    if name.endswith(".safetensors") and rng.random() < 0.7:
        # The header is changed but its length is right, so that its content is read.
        size = int.from_bytes(data[:8], "little")
        header = changed(rng, data[8 : 8 + size], _WORDS["safetensors"])
        files[name] = len(header).to_bytes(8, "little") + header + data[8 + size :]
    elif rng.random() < 0.8:
        files[name] = changed(rng, data, _WORDS["safetensors"])
    else:  # any bytes are valid data
        files[name] = data[:-4] + rng.randbytes(4)
    return files


def _feed_safetensors(path: pathlib.Path) -> None:
    tensors = safetensors.Tensors(path.parent)
    if sum(x.nbytes for x in tensors.values()) > sum(p.stat().st_size for p in _folder().iterdir()):
        raise RuntimeError("tensors overlap")
    for name in tensors:
        flat = tensors[name].reshape(-1)
        _ = tensors.shape(name), tensors.type(name), flat[:1].tobytes(), flat[-1:].tobytes()


@functools.cache
def _gguf() -> tuple[dict[str, Any], dict[str, tuple]]:
    """Fields and tensors of a small file, with llama.cpp's names."""
    fields = {
        **{"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64},
        **{"llama.embedding_length": 8, "llama.feed_forward_length": 8, "general.alignment": 32},
        **{"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1},
        **{"llama.attention.layer_norm_rms_epsilon": 1e-6, "llama.rope.freq_base": 1e4},
        **{"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"},
        **{"tokenizer.ggml.tokens": ["a", "b", "ab", "</s>"], "tokenizer.ggml.merges": ["a b"]},
        **{"tokenizer.ggml.token_type": [1, 1, 1, 3], "tokenizer.ggml.eos_token_id": 3},
        **{"tokenizer.chat_template": "{{ messages }}", "general.quantized": False},
    }
    shapes = {
        **{"token_embd.weight": (4, 8), "output_norm.weight": (8,), "blk.0.attn_q.weight": (8, 8)},
        **{"blk.0.attn_k.weight": (4, 8), "blk.0.ffn_up.weight": (8, 8), "rope_freqs.weight": (2,)},
    }
    return fields, {name: (shape, 0, bytes(4 * math.prod(shape))) for name, shape in shapes.items()}


_GGUF_WORDS = [
    *(struct.pack("<Q", n) for n in (0, 1, 8, 1 << 31, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63)),
    *(struct.pack("<I", n) for n in (0, 1, 2, 3, 7, 8, 9, 12, 13, 30, 0xFFFFFFFF)),
    *(b"GGUF", b"blk.0.attn_q.weight", b"output.weight", b"llama", b"qwen2", b"\xff", bytes(64)),
]


def _make_gguf(rng: random.Random) -> dict[str, bytes]:
    fields, tensors = _gguf()
    if rng.random() < 0.5:
        fields = _table(rng, fields)
        fields = {name: value for name, value in fields.items() if _is_of_gguf(value)}
        tensors = {
            name: (tuple(rng.choice((n, n, n, 0, 1, 1 << 40)) for n in shape), kind, data)
            if rng.random() < 0.1
            else (shape, rng.choice((1, 2, 8, 12, 30)) if rng.random() < 0.1 else kind, data)
            for name, (shape, kind, data) in tensors.items()
            if rng.random() < 0.98
        }
    data = gguf_files.contents(fields, tensors)
    return {gguf.FILE: data if rng.random() < 0.3 else changed(rng, data, _GGUF_WORDS)}


def _is_of_gguf(value: Any) -> bool:
    """Whether GGUF can represent a value."""
    errors = (struct.error, ArithmeticError, ValueError, TypeError, LookupError, AttributeError)
    with contextlib.suppress(*errors):
        return bool(gguf_files.field("", value))
    return False


def _feed_gguf(path: pathlib.Path) -> None:
    tensors = gguf.Tensors(path)
    for name in tensors:
        _ = tensors.shape(name), tensors.type(name), tensors[name].tobytes()
    if path.stat().st_size % 8 == 0:  # slower than everything else
        gguf.write_tokenizer(path.parent, tensors.header.fields)


_MODEL = json.loads((harness.TINY / "config.json").read_text()) | {
    **{"head_dim": 32, "sliding_window": None, "layer_types": ["full_attention"] * 3},
    "rope_scaling": harness.LLAMA3,
    "quantization_config": packed_formats.named("nvfp4").config,
}
_ADAPTER = {
    **{"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "use_rslora": False},
    **{"target_modules": ["q_proj", "v_proj"], "exclude_modules": None, "modules_to_save": None},
    **{"rank_pattern": {"q_proj": 4}, "alpha_pattern": {}, "layers_to_transform": [0, 1]},
    **{"init_lora_weights": True, "use_dora": False, "base_model_name_or_path": "a"},
}
_METRICS = {"step": 1, "reward": 0.5, "num_tokens": 100, "loss": 1e-9, "grad_norm": None}
_VALUES = [
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e308, 10**40, 2**31, 2**63),
    *("", "a", "4", "\ud800"),
    *([], {}, [[]], [None], {"a": None}, [1, "a"], float("nan"), float("inf"), "full_attention"),
    *("llama", "qwen3", "mistral", "llama3", "yarn", "bitsandbytes", "modelopt", "mxfp4", "NVFP4"),
    *("all-linear", ".*_proj", "(", "dora", "all", "../../x", "pissa"),
]


def _table(rng: random.Random, table: dict[str, Any]) -> dict[str, Any]:
    """A table in which some fields, at any depth, are changed, missing or new."""
    made = {}
    for name, value in table.items():
        chance = rng.random()
        if chance < 0.04:
            made[name] = rng.choice(_VALUES)
        elif isinstance(value, dict):
            made[name] = _table(rng, value)
        elif chance < 0.98:
            made[name] = value
    if rng.random() < 0.1:
        made[rng.choice(("a", "", "type", "quant_algo", "rope_parameters"))] = rng.choice(_VALUES)
    return made


def _of_table(
    name: str, table: dict[str, Any], feed: Callable[[pathlib.Path], Any], may_refuse: bool = True
) -> Target:
    """Returns a target that reads the folder of a file with a changed table."""

    def make(rng: random.Random) -> dict[str, bytes]:
        data = json.dumps(_table(rng, table)).encode()
        return {name: data if rng.random() < 0.7 else changed(rng, data, _WORDS["json"])}

    folder_of = lambda files: _written(files).parent
    return Target(make, feed, folder_of, may_refuse=may_refuse)


_ROWS = [  # prompts of `qerl generate --input`
    b'{"prompt": "What is 1 + 2?", "seed": 1}\n{"prompt": "b", "seed": 2, "answer": "c"}\n',
    b'{"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}\n',
    b"What is 1 + 2?\nAnd 3?\r\n\n",
    '\ufeff{"prompt": "東京 🙂"}\n'.encode(),
]


def _make_rows(rng: random.Random) -> dict[str, bytes]:
    data = b"".join(rng.choices(_ROWS, k=rng.choice((1, 1, 2))))
    name = rng.choice(("prompts.jsonl", "prompts.jsonl", "prompts.txt"))
    return {name: changed(rng, data, _WORDS["rows"])}


def _make_text(kind: str) -> Callable[[random.Random], str]:
    """Returns a function that makes text from words; one in a hundred has a long repeat, as models repeat themselves."""

    def make(rng: random.Random) -> str:
        some = lambda *counts: "".join(rng.choices(_WORDS[kind], k=rng.choice(counts)))
        text = some(1, 4, 16, 64)
        if rng.random() < 0.01:
            piece = some(1, 1, 2, 3)
            text += piece * (rng.choice((2_000, 20_000, 60_000)) // len(piece) + 1) + some(0, 1, 4)
        return text

    return make


_READERS = (
    *(answers.last_block, answers.tagged, answers.after_reasoning, answers.after_hashes),
    *(answers.last_number, answers.last_boxed, answers.last_boxes, answers.answer_line),
    *(answers.stated, answers.canonical, answers.last_code, answers.number, answers.minerva_form),
    *(verl_answers.strict_number, verl_answers.flexible_number, verl_answers.answer_line),
    *(verl_answers.boxed, verl_answers.hendrycks_vote, latex_form.latex_form),
)
# The rewards that judge texts in this process.
_OTHERS = ("token_hash_reward", "code_reward", "math_verify_reward", "reasoning_accuracy_reward")
_REWARDS = [reward for name, reward in stock.STOCK.items() if name not in _OTHERS]


def _feed_answer(text: str) -> None:
    for read in _READERS:
        read(text)
    answers.same(text, "12"), verl_answers.same_in_hendrycks_form(text, "\\frac12")
    for reward in _REWARDS:
        reward(completions=[text], answer=["12"])
        reward(completions=["\\boxed{12}"], answer=[text])


def _feed_calls(text: str) -> None:
    for call_format in ("hermes", "llama3_json"):
        tool_calls.parse(text, call_format)
        tool_calls.parse(f'{{"name": "a"}}{text}', call_format)


_TEMPLATES = [
    "{%- for m in messages %}{{- '<|' + m.role + '|>' + m.content }}{%- endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ ns.n }}"
    "{% if loop.last %}{{ m.content | trim }}{% endif %}{% endfor %}",
    "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
]
_CHAT = ({"role": "system", "content": "Think."}, {"role": "user", "content": "What is 1 + 2?"})


def _make_template(rng: random.Random) -> str:
    words = rng.choices(_WORDS["templates"], k=rng.choice((1, 2, 4, 12)))
    if rng.random() < 0.5:
        return "".join(words)
    base = rng.choice(_TEMPLATES)
    for word in words:
        place = rng.randrange(len(base) + 1)
        base = base[:place] + word + base[place + rng.choice((0, 0, 1, 9)) :]
    if rng.random() < 0.01:
        base += rng.choice(_WORDS["templates"]) * 10 ** rng.randrange(2, 5)
    return base


@functools.cache
def _renderers() -> process_pool.Pool:
    limits = {"workers": 1, "seconds": 0.25, "memory_bytes": 1 << 29}
    return process_pool.Pool("tests.faults.fuzz_watch", **limits)


def _feed_template(template: str) -> None:
    (text,) = chat_template.render(template, [_CHAT], {"eos_token": "</s>"}, pool=_renderers())
    if text.startswith(fuzz_watch.DID):
        raise RuntimeError(text)


_OF_POOLS = ("subprocess.Popen", "open", "os.posix_spawn", "os.kill", "import")
TARGETS = {
    "config": Target(_make_config, config.load, _written, count=1_000_000),
    "safetensors": Target(_make_safetensors, _feed_safetensors, _written, count=1_000_000),
    # It writes the file's tokenizer into the folder, and imports the package that reads GGUF.
    "gguf": Target(_make_gguf, _feed_gguf, _written, count=1_000_000, does=("open", "import")),
    "model": _of_table(
        "config.json",
        _MODEL,
        lambda path: (architecture.load(path), packed_formats.of_folder(path)),
    ),
    "adapter": _of_table("adapter_config.json", _ADAPTER, peft.read_lora),
    "metrics": _of_table("metrics.jsonl", _METRICS, logger.read_metrics, may_refuse=False),
    "prompts": Target(
        _make_rows,
        lambda path: generate.prompts_of(generate.read_rows((), path, None), None),
        _written,
    ),
    "answers": Target(_make_text("answers"), _feed_answer, seconds=5.0, may_refuse=False),
    "calls": Target(_make_text("calls"), _feed_calls, may_refuse=False),
    # It starts the process that renders, in which actions are watched.
    "templates": Target(_make_template, _feed_template, does=_OF_POOLS),
}


def main() -> int:
    """Runs the trial. Returns 0 if there was no fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--count", type=int, help="inputs of each target, instead of its own count")
    parser.add_argument("--input", type=int, help="feed only this input, and show it")
    options = parser.parse_args()
    if options.input is not None:
        (name,) = options.only
        content = TARGETS[name].make(random.Random(f"{options.seed}/{name}/{options.input}"))
        print(repr(content), flush=True)
        TARGETS[name].feed(TARGETS[name].prepare(content))
        return 0
    print("| target | inputs | read | slowest | faults |\n| --- | --- | --- | --- | --- |")
    is_faulty = False
    for name in options.only:
        count = options.count or TARGETS[name].count
        result = trial(name, TARGETS[name], options.seed, range(count))
        is_faulty |= bool(result.faults)
        read, slowest = f"{count:,} | {result.read:,}", f"{1e3 * result.slowest:.0f} ms"
        print(f"| {name} | {read} | {slowest} | {len(result.faults)} |", flush=True)
        for number, fault in itertools.islice(result.faults.items(), 20):
            print(f"  {name} {number}: {fault!r}", flush=True)
    return int(is_faulty)


if __name__ == "__main__":
    sys.exit(main())
