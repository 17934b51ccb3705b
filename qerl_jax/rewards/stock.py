r"""The stock reward functions, all verifiable, with the signature that `scoring` describes.

Rewards of correctness compare the answer that `data.answers` extracts, or that verl would extract
(`data.verl_answers`). `math_verify_reward` uses a computer algebra system, and `code_reward` runs the program.
Rewards of format check think/answer tags. Rewards of length and repetition come from factories with TRL's names,
configured by `[rewards.options.NAME]`; that of DAPO's overlong punishment is configured by `rewards.soft_punish_cache`.

Most functions judge one text; `_by_text` and `_by_answer` give them the common signature. A reward that compares
mathematically has an attribute `votes`, which groups answers that count as the same vote (`votes.mathematical`).
"""

import collections
import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.data import answers, verl_answers
from qerl_jax.rewards import sandbox, votes
from qerl_jax.system import process_pool
from qerl_jax.system.checked import require

type RewardFunction = Callable[..., Any]

_TAG = r"</?(?:think|answer)>"
_WELL_FORMED = re.compile(
    rf"\s*<think>(?:(?!{_TAG}).)*</think>\s*<answer>(?:(?!{_TAG}).)*</answer>\s*", re.DOTALL
)
_ONE_LINE_EACH = re.compile(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>\n")
_BETWEEN_BLOCKS = re.compile(r"</think>\s*<answer>")
_XML_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
# Number of characters at the end that DAPO's strict scorer reads (verl's math_dapo).
_DAPO_BOXED_TAIL = 100


def completion_text(completion: str | Sequence[Mapping[str, str]]) -> str:
    """Returns the text of a completion: the string itself, or the content of the last message of a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _by_text(judge: Callable[[str], float]) -> RewardFunction:
    """Makes a reward function from one that judges a single text."""

    @functools.wraps(judge)
    def reward(completions: Sequence, **_) -> list[float]:
        return [judge(completion_text(completion)) for completion in completions]

    return reward


def _by_answer(judge: Callable[[str, str], float]) -> RewardFunction:
    """Makes a reward function from one that judges a single text by its row's answer; None without an answer."""

    @functools.wraps(judge)
    def reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
        return [
            None if gold is None else judge(completion_text(completion), gold)
            for completion, gold in zip(completions, map(answers.gold_text, answer), strict=True)
        ]

    return reward


@_by_answer
def accuracy_reward(text: str, answer: str) -> float:
    """Returns 1 if the last `<answer>` block holds the row's answer, else 0.

    Numbers are compared by value ("$1,234.00" equals "1234"), anything else as stripped text.
    """
    return answers.same(answers.last_block(text), answer)


@_by_answer
def gsm8k_hash_reward(text: str, answer: str) -> float:
    """Returns 1 if the number after the last `####` (GSM8K's format) is the row's answer, else 0."""
    return answers.same(answers.after_hashes(text), answer)


@_by_answer
def gsm8k_flexible_reward(text: str, answer: str) -> float:
    """Returns 1 if the last number of the text is the row's answer, else 0; the text may have any format."""
    return answers.same(answers.last_number(text), answer)


@_by_answer
def boxed_reward(text: str, answer: str) -> float:
    r"""Returns 1 if the last `\boxed{}` holds the row's answer, by value or in Minerva's form, else 0.

    Unlike in Minerva's form, "1,2" is not "12".
    """
    boxed = answers.last_boxed(text)
    return float(boxed is not None and answers.canonical(boxed) == answers.canonical(answer))


@_by_answer
def dapo_reward(text: str, answer: str) -> float:
    """Returns 1 if the last "Answer: ..." is the row's answer in Minerva's form, else 0.

    Only the last 300 characters are read. DAPO gives -1 for a wrong answer (arXiv:2503.14476, equation 7), QeRL gives
    0.
    """
    return float(_equal_in_minerva_form(verl_answers.answer_line(text), answer))


@_by_answer
def dapo_boxed_reward(text: str, answer: str) -> float:
    r"""Returns 1 if the last `\boxed{}` in the last 100 characters holds exactly the row's answer, else 0.

    This is DAPO's strict variant.
    """
    return float(answers.last_boxed(text[-_DAPO_BOXED_TAIL:]) == answer)


@_by_answer
def verl_gsm8k_reward(text: str, answer: str) -> float:
    """Returns 1 if the number after the last `#### ` in the last 300 characters is the row's answer, else 0.

    This is verl's default ("strict") score for GSM8K. Numbers are compared as text without commas.
    """
    return float(verl_answers.strict_number(text) == answer.replace(",", ""))


@_by_answer
def verl_gsm8k_flexible_reward(text: str, answer: str) -> float:
    """Returns 1 if the last number in the last 300 characters is the row's answer, else 0.

    This is verl's "flexible" score for GSM8K. Numbers are compared as text, so "1,234" and "18." are wrong.
    """
    return float(verl_answers.flexible_number(text) == answer.replace(",", ""))


@_by_answer
def verl_math_reward(text: str, answer: str) -> float:
    r"""Returns 1 if the last `\boxed{}` holds the row's answer in Hendrycks' normal form, else 0.

    This is verl's score for MATH and MATH-500.
    """
    boxed = verl_answers.boxed(text)
    return float(boxed is not None and verl_answers.same_in_hendrycks_form(boxed, answer))


@_by_answer
def verl_aime_reward(text: str, answer: str) -> float:
    """Returns `dapo_reward` after writing the row's answer as verl's AIME rows do: 25 for "025" or "25.0"."""
    gold = answer if answers.number(answer) is None else answers.canonical(answer)
    return float(_equal_in_minerva_form(verl_answers.answer_line(text), gold))


@_by_answer
def xml_answer_reward(text: str, answer: str) -> float:
    """Returns 2 if the tagged answer (`answers.tagged`) is exactly the row's answer, else 0.

    Source: QeRL's published code for GSM8K.
    """
    return 2.0 * (answers.tagged(text) == answer)


@_by_text
def int_reward(text: str) -> float:
    """Returns 0.2 if the tagged answer has only digits, else 0 (QeRL's published code)."""
    return 0.2 * answers.tagged(text).isdigit()


@_by_text
def format_reward(text: str) -> float:
    """Returns 1 for one `<think>` block, then one `<answer>` block, with only whitespace around them; else 0."""
    return float(_WELL_FORMED.fullmatch(text) is not None)


@_by_text
def soft_format_reward(text: str) -> float:
    """Returns 0.2 if a `<think>` block followed by an `<answer>` block occurs anywhere, else 0.

    QeRL adds it to the reward for accuracy (arXiv:2510.11696, its published code).
    """
    # Each tag is searched after the one before, which takes linear time. A pattern with three wildcards would take
    # seconds on a text that repeats its tags.
    _, think, rest = text.partition("<think>")
    between = _BETWEEN_BLOCKS.search(rest)
    return 0.2 * bool(think and between and "</answer>" in rest[between.end() :])


@_by_text
def strict_format_reward(text: str) -> float:
    """Returns 0.2 if every tag is on its own line, with one line of text in each block, else 0.

    Source: the pattern in QeRL's published code; reasoning of several lines does not match.
    """
    return 0.2 * bool(_ONE_LINE_EACH.fullmatch(text))


@_by_text
def think_reward(text: str) -> float:
    """Returns 0.2 if a `<think>` block occurs anywhere, else 0 (QeRL's published code)."""
    return 0.2 * ("</think>" in text.partition("<think>")[2])


@_by_text
def think_format_reward(text: str) -> float:
    """Returns 1 if the text begins with its only `<think>` and closes it, else 0 (TRL's reward)."""
    return float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)


@_by_text
def xmlcount_reward(text: str) -> float:
    r"""Returns 0.125 for each of the four tags that occurs exactly once on its own line, less a penalty.

    The penalty is 0.001 per character after the last `\n</answer>` and its newline. The widely copied original counts
    these characters twice, and counts the whole text if no newline follows the tag; here they count once.
    """
    _, closed, rest = text.rpartition(_XML_LINES[-1])
    trailing = len(rest.removeprefix("\n")) if closed else 0
    return 0.125 * sum(text.count(line) == 1 for line in _XML_LINES) - 0.001 * trailing


def correct_and_well_formed_reward(
    completions: Sequence, answer: Sequence, **_
) -> list[float | None]:
    """Returns 1 if `accuracy_reward` and `format_reward` both give 1, else 0; None for a row without an answer."""
    scores = zip(accuracy_reward(completions, answer), format_reward(completions), strict=True)
    return [None if correct is None else correct * formed for correct, formed in scores]


def token_hash_reward(completion_ids: Sequence, **_) -> list[float]:
    """Returns a pseudo-random number in [0, 1) that depends only on the row's token ids.

    It is for benchmarks with random weights: different completions get different rewards, so every group has a
    gradient, and the same tokens get the same reward in every process.
    """
    digests = [
        hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=4).digest()
        for ids in completion_ids
    ]
    return [int.from_bytes(digest, "little") / 2**32 for digest in digests]


def get_math_verify_reward(seconds: float = 5.0, workers: int | None = None) -> RewardFunction:
    r"""Makes `math_verify_reward`: 1 if the completion's answer equals the row's, else 0.

    math-verify compares the two mathematically, in worker processes; `math_judge.agrees` says which part of a
    completion is its answer. The reward is None if the row has no answer, or a gold answer that the judge cannot
    parse, or not in time. If a judge is killed or fails because of the completion, the reward is 0, not None: such a
    completion has no valid answer, and must stay in the comparison with its group. These cases are logged as
    `rewards/math_verify_reward/timeouts` (killed at the limit) and `.../failures` (anything else).

    Args:
        seconds: CPU seconds per judgement; the wall-clock limit is five times as long.
        workers: Number of processes; None means half of the processors, at most 8.
    """
    return _math_reward("math_verify_reward", lambda text: text, workers, seconds)


def get_reasoning_accuracy_reward(
    seconds: float = 5.0, workers: int | None = None
) -> RewardFunction:
    """Makes `reasoning_accuracy_reward`: `math_verify_reward` of the text after the last `</think>`.

    The reward is 0 if there is no `</think>`, as in TRL's function of that name. Arguments are those of
    `get_math_verify_reward`.
    """
    return _math_reward("reasoning_accuracy_reward", answers.after_reasoning, workers, seconds)


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> RewardFunction:
    """Makes `cosine_scaled_reward`: correct answers earn more when short, wrong ones when long.

        v_long + (v_short - v_long) (1 + cos(pi min(tokens / max_len, 1))) / 2

    with (v_short, v_long) = (max_value_correct, min_value_correct) for a correct answer and
    (min_value_wrong, max_value_wrong) for a wrong one. `math_verify_reward` judges correctness; if it gives None, so
    does this.

    Source: Yeo et al. 2025 (arXiv:2502.03373), appendix C.1; names and defaults are TRL's.

    Args:
        max_len: Length in tokens from which on the reward is v_long.
        min_value_wrong: Reward of the shortest wrong answer.
        max_value_wrong: Reward of the longest wrong answer.
        min_value_correct: Reward of the longest correct answer.
        max_value_correct: Reward of the shortest correct answer.

    Raises:
        ValueError: If `max_len` is not positive.
    """
    require(max_len >= 1, "max_len", max_len, "must be at least 1")
    is_correct = get_math_verify_reward()

    def scale(correct: float, tokens: int) -> float:
        right, wrong = (max_value_correct, min_value_correct), (min_value_wrong, max_value_wrong)
        short, long = right if correct else wrong
        return long + (short - long) * (1 + math.cos(math.pi * min(tokens / max_len, 1.0))) / 2

    def cosine_scaled_reward(
        completions: Sequence, answer: Sequence, completion_ids: Sequence, **extras
    ) -> list[float | None]:
        verdicts = is_correct(completions, answer, **extras)
        return [
            None if correct is None else scale(correct, len(ids))
            for correct, ids in zip(verdicts, completion_ids, strict=True)
        ]

    return _with(cosine_scaled_reward, votes=vars(is_correct)["votes"])


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RewardFunction:
    """Makes `repetition_penalty_reward`: max_penalty * (1 - unique n-grams / all n-grams) of a completion.

    N-grams are of token ids. The reward is 0 for a completion shorter than an n-gram.

    Source: Yeo et al. 2025 (arXiv:2502.03373), appendix C.2; names and defaults are TRL's.

    Args:
        ngram_size: Number of tokens in an n-gram.
        max_penalty: Limit of the reward for endless repetition; not positive.

    Raises:
        ValueError: If `ngram_size` is not positive or `max_penalty` is.
    """
    require(ngram_size >= 1, "ngram_size", ngram_size, "must be at least 1")
    require(max_penalty <= 0, "max_penalty", max_penalty, "must not be positive")

    def repetition_penalty_reward(completion_ids: Sequence, **_) -> list[float]:
        def judge(ids: Sequence[int]) -> float:
            grams = list(zip(*(ids[start:] for start in range(ngram_size)), strict=False))
            return max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0

        return [judge(list(map(int, ids))) for ids in completion_ids]

    return repetition_penalty_reward


def get_soft_overlong_punishment(
    max_completion_length: int, soft_punish_cache: int
) -> RewardFunction:
    """Makes a reward that punishes a completion for each of the last allowed tokens that it uses.

        0                                     where length <= max_completion_length - cache
        (max_completion_length - cache - length) / cache             from there on, down to -1

    Args:
        max_completion_length: The most tokens of a completion.
        soft_punish_cache: The number of last tokens over which the punishment rises; positive.

    Returns:
        The reward function, which takes `completion_ids`. DAPO (arXiv:2503.14476), eq. 13; names are TRL's.
    """
    # XLA, which computed this once, multiplies by the reciprocal of a constant: a division may differ in the last bit.
    share_of_token = np.float32(1) / np.float32(soft_punish_cache)

    def soft_overlong_punishment_reward(completion_ids: Sequence, **_) -> list[float]:
        lengths = np.array([len(ids) for ids in completion_ids])
        over = np.asarray(lengths - (max_completion_length - soft_punish_cache), np.float32)
        return [-float(share) for share in np.clip(over * share_of_token, 0, 1)]

    return soft_overlong_punishment_reward


def get_code_reward(
    seconds: float = 5.0, memory_mb: int = 1024, workers: int | None = None
) -> RewardFunction:
    """Makes `code_reward`: the fraction of a row's tests that the last Python block of the completion passes.

    The column `verification_info` holds `{"language": "python", "test_cases": [{"input": text,
    "output": text}, ...]}`, as in open-r1's verifiable coding problems. A program passes a test if it ends in time
    with status 0 and writes the expected lines, ignoring trailing whitespace. The reward is None for a row without
    such tests (another language, or tests that call a function), and 0 without a code block. Programs run in
    `sandbox`; the number that a time limit ended is logged as `rewards/code_reward/timeouts`.

    Args:
        seconds: CPU seconds per test; the wall-clock limit is twice as long.
        memory_mb: Address space of one program in MiB.
        workers: Number of programs at a time; None means one per processor.

    Raises:
        NotImplementedError: When the reward is called, if programs cannot be isolated.
        ValueError: If `seconds` is not positive or `memory_mb` is less than 64.
    """
    programs = sandbox.runner(sandbox.Limits(seconds, memory_mb), workers)

    def jobs_of(completions: Sequence, tests: Sequence) -> list[tuple[int, str, Mapping[str, str]]]:
        written = [answers.last_code(completion_text(completion)) for completion in completions]
        return [
            (row, program, test)
            for row, (program, row_tests) in enumerate(zip(written, tests, strict=True))
            if program is not None
            for test in row_tests or ()
        ]

    def begin(completions: Sequence, verification_info: Sequence = (), **_) -> None:
        jobs = jobs_of(completions, [_stdin_tests(info) for info in verification_info])
        programs.begin([(program, test["input"]) for _, program, test in jobs])

    def code_reward(
        completions: Sequence, verification_info: Sequence, log_metric: Callable | None = None, **_
    ) -> list[float | None]:
        tests = [_stdin_tests(info) for info in verification_info]
        jobs = jobs_of(completions, tests)
        outcomes = programs.map([(program, test["input"]) for _, program, test in jobs])
        passed = collections.Counter(
            row
            for (row, _, test), outcome in zip(jobs, outcomes, strict=True)
            if outcome.status == "ok" and _lines(outcome.output) == _lines(test["output"])
        )
        if log_metric is not None:
            late = sum(outcome.status == "timeout" for outcome in outcomes)
            log_metric("rewards/code_reward/timeouts", late)
        return [
            passed[row] / len(row_tests) if row_tests else None
            for row, row_tests in enumerate(tests)
        ]

    return _with(code_reward, begin=begin)


def _equal_in_minerva_form(text: str | None, answer: str) -> bool:
    return text is not None and answers.minerva_form(text) == answers.minerva_form(answer)


# All rewards with the same settings share one pool of processes.
@functools.cache
def _math_judges(workers: int | None, seconds: float) -> process_pool.Pool:
    half = min(8, max(1, (os.cpu_count() or 1) // 2))
    return process_pool.Pool(
        "qerl_jax.rewards.math_judge", workers=half if workers is None else workers, seconds=seconds
    )


def _math_reward(
    name: str, read: Callable[[str], str], workers: int | None, seconds: float
) -> RewardFunction:
    """Makes the reward `name`, which compares the part of a text that `read` returns with the row's answer."""
    judges = _math_judges(workers, seconds)

    def reward(
        completions: Sequence, answer: Sequence, log_metric: Callable | None = None, **_
    ) -> list[float | None]:
        texts = [read(completion_text(completion)) for completion in completions]
        golds = [answers.gold_text(gold) for gold in answer]
        unlike = [gold for gold in dict.fromkeys(golds) if gold is not None]
        readable = judges.map("is_readable", [(gold,) for gold in unlike])
        known = {gold for gold, verdict in zip(unlike, readable, strict=True) if verdict is True}
        rows = [row for row, gold in enumerate(golds) if gold in known]
        verdicts = judges.map("agrees", [(golds[row], texts[row]) for row in rows])
        if log_metric is not None:
            failures = [v for v in (*readable, *verdicts) if isinstance(v, process_pool.Failure)]
            late = sum(failure.reason == "timeout" for failure in failures)
            log_metric(f"rewards/{name}/timeouts", late)
            log_metric(f"rewards/{name}/failures", len(failures) - late)
        scores = dict(zip(rows, (float(verdict is True) for verdict in verdicts), strict=True))
        return [scores.get(row) for row in range(len(answer))]

    def begin(completions: Sequence, answer: Sequence = (), **_) -> None:
        pairs = [
            (gold, read(completion_text(completion)))
            for gold, completion in zip(map(answers.gold_text, answer), completions, strict=True)
            if gold is not None
        ]
        judges.begin("is_readable", [(gold,) for gold, _ in pairs])
        judges.begin("agrees", pairs)

    reward.__name__ = name
    return _with(reward, begin=begin, votes=functools.partial(votes.mathematical, judges))


def _with(reward: RewardFunction, **attributes: Callable) -> RewardFunction:
    """Returns a reward function that has the attributes which `scoring` describes."""
    vars(reward).update(attributes)
    return reward


def _stdin_tests(info: Mapping[str, Any] | None) -> list[Mapping[str, str]] | None:
    """Returns a row's tests if each is an input text and an output text of a Python program, else None."""
    if not info or info.get("language") != "python":
        return None
    tests = info.get("test_cases") or []
    plain = all(
        isinstance(test.get("input"), str)
        and isinstance(test.get("output"), str)
        and test.get("type") in (None, "stdin_stdout")
        for test in tests
    )
    return list(tests) if plain and tests else None


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


# Reward functions by name, ready to use.
STOCK: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        *(accuracy_reward, boxed_reward, get_code_reward(), correct_and_well_formed_reward),
        *(dapo_boxed_reward, dapo_reward, format_reward, gsm8k_flexible_reward, gsm8k_hash_reward),
        *(int_reward, get_math_verify_reward(), get_reasoning_accuracy_reward()),
        *(soft_format_reward, strict_format_reward, think_format_reward, think_reward),
        *(token_hash_reward, verl_aime_reward, verl_gsm8k_flexible_reward, verl_gsm8k_reward),
        *(verl_math_reward, xml_answer_reward, xmlcount_reward),
    )
}
# Rewards that judge format, length or repetition, not whether the answer is right.
SHAPING = frozenset(
    "format_reward int_reward repetition_penalty_reward soft_format_reward soft_overlong_punishment_reward "
    "strict_format_reward think_format_reward think_reward xmlcount_reward".split()
)
# Factories by name, called with the entries of `[rewards.options.NAME]`.
FACTORIES: dict[str, Callable[..., RewardFunction]] = {
    factory.__name__: factory
    for factory in (
        get_code_reward,
        get_cosine_scaled_reward,
        get_math_verify_reward,
        get_reasoning_accuracy_reward,
        get_repetition_penalty_reward,
    )
}
