r"""The stock rewards, all verifiable, with the signature that `scoring` describes.

Correctness: these compare the answers that `data.answers` finds, or those that verl would find
(`data.verl_answers`); `math_verify_reward` asks a computer algebra system, and `code_reward` runs the program.
Form: think/answer tags. Length and repetition: factories under TRL's names, configured by
`[rewards.options.NAME]`. DAPO's overlong punishment is in `rl.grpo`.

Most judge one text; `_by_text` and `_by_answer` give them that signature. A reward that compares
mathematics has an attribute `votes`, which says which answers count as one vote (`votes.mathematical`).
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

from qerl_jax import process_pool
from qerl_jax.checked import require
from qerl_jax.data import answers, verl_answers
from qerl_jax.rewards import sandbox, votes

type RewardFunction = Callable[..., Any]

_TAG = r"</?(?:think|answer)>"
_WELL_FORMED = re.compile(
    rf"\s*<think>(?:(?!{_TAG}).)*</think>\s*<answer>(?:(?!{_TAG}).)*</answer>\s*", re.DOTALL
)
_ONE_LINE_EACH = re.compile(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>\n")
_BETWEEN_BLOCKS = re.compile(r"</think>\s*<answer>")
_XML_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
# DAPO's strict scorer reads no more than this of the end (verl's math_dapo).
_DAPO_BOXED_TAIL = 100


def completion_text(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a completion in either form: a string, or the last message of a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def _by_text(judge: Callable[[str], float]) -> RewardFunction:
    """Makes a reward function from one that judges a single text."""

    @functools.wraps(judge)
    def reward(completions: Sequence, **_) -> list[float]:
        return [judge(completion_text(completion)) for completion in completions]

    return reward


def _by_answer(judge: Callable[[str, str], float]) -> RewardFunction:
    """Makes a reward function from one that judges a single text by its row's answer."""

    @functools.wraps(judge)
    def reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
        return [
            None if expected is None else judge(completion_text(completion), str(expected))
            for completion, expected in zip(completions, answer, strict=True)
        ]

    return reward


@_by_answer
def accuracy_reward(text: str, answer: str) -> float:
    """1 where the last `<answer>` block holds the row's answer, else 0; None without an answer.

    Numbers are compared by value ("$1,234.00" is "1234"), anything else as stripped text.
    """
    return answers.same(answers.last_block(text), answer)


@_by_answer
def gsm8k_hash_reward(text: str, answer: str) -> float:
    """1 where the number after the last `####` is the row's answer, else 0 (GSM8K's own form)."""
    return answers.same(answers.after_hashes(text), answer)


@_by_answer
def gsm8k_flexible_reward(text: str, answer: str) -> float:
    """1 where the last number of the text is the row's answer, whatever its form, else 0."""
    return answers.same(answers.last_number(text), answer)


@_by_answer
def boxed_reward(text: str, answer: str) -> float:
    r"""1 where the last `\boxed{}` holds the row's answer by value or in Minerva's form, else 0.

    A list of numbers is not the number of its digits: "1,2" is not "12".
    """
    given = answers.last_boxed(text)
    return float(given is not None and answers.canonical(given) == answers.canonical(answer))


@_by_answer
def dapo_reward(text: str, answer: str) -> float:
    """1 where the last "Answer: ..." is the row's answer in Minerva's form, else 0.

    Only the last 300 characters are read. DAPO itself gives -1 for a wrong answer
    (arXiv:2503.14476, equation 7); QeRL replaced it by 0.
    """
    return float(_equal_in_minerva_form(verl_answers.answer_line(text), answer))


@_by_answer
def dapo_boxed_reward(text: str, answer: str) -> float:
    r"""1 where the last `\boxed{}` of the last 100 characters holds exactly the row's answer.

    DAPO's strict variant; 0 elsewhere.
    """
    return float(answers.last_boxed(text[-_DAPO_BOXED_TAIL:]) == answer)


@_by_answer
def verl_gsm8k_reward(text: str, answer: str) -> float:
    """1 where the number after the last `#### ` of the last 300 characters is the row's answer, else 0.

    This is verl's default ("strict") score for GSM8K: compared digit by digit, ignoring commas.
    """
    return float(verl_answers.strict_number(text) == answer.replace(",", ""))


@_by_answer
def verl_gsm8k_flexible_reward(text: str, answer: str) -> float:
    """1 where the last number of the last 300 characters is the row's answer, else 0.

    This is verl's "flexible" score for GSM8K: compared digit by digit, so "1,234" and "18." are wrong.
    """
    return float(verl_answers.flexible_number(text) == answer.replace(",", ""))


@_by_answer
def verl_math_reward(text: str, answer: str) -> float:
    r"""1 where the last `\boxed{}` holds the row's answer in Hendrycks' normal form, else 0.

    This is verl's score for MATH and MATH-500.
    """
    given = verl_answers.boxed(text)
    return float(given is not None and verl_answers.same_in_hendrycks_form(given, answer))


@_by_answer
def verl_aime_reward(text: str, answer: str) -> float:
    """`dapo_reward` with the row's answer as in verl's own AIME rows: 25 for "025" or "25.0"."""
    gold = answer if answers.number(answer) is None else answers.canonical(answer)
    return float(_equal_in_minerva_form(verl_answers.answer_line(text), gold))


@_by_answer
def xml_answer_reward(text: str, answer: str) -> float:
    """2 where the tagged answer equals the row's exactly, else 0; see `answers.tagged`.

    QeRL's GSM8K reward (its published code).
    """
    return 2.0 * (answers.tagged(text) == answer)


@_by_text
def int_reward(text: str) -> float:
    """0.2 where the tagged answer has digits only, else 0 (QeRL's)."""
    return 0.2 * answers.tagged(text).isdigit()


@_by_text
def format_reward(text: str) -> float:
    """1 for one `<think>` block, then one `<answer>` block, with only whitespace around them; else 0."""
    return float(_WELL_FORMED.fullmatch(text) is not None)


@_by_text
def soft_format_reward(text: str) -> float:
    """0.2 where a `<think>` block followed by an `<answer>` block occurs anywhere, else 0.

    QeRL adds it to accuracy (arXiv:2510.11696, its published code).
    """
    # Each tag is searched from the place of the one before, which is linear in the text. One pattern with three
    # wildcards would take seconds on text that repeats its tags.
    _, think, rest = text.partition("<think>")
    between = _BETWEEN_BLOCKS.search(rest)
    return 0.2 * bool(think and between and "</answer>" in rest[between.end() :])


@_by_text
def strict_format_reward(text: str) -> float:
    """0.2 where every tag has a line of its own, with one line of text in each block, else 0.

    As QeRL's published pattern has it: reasoning of several lines does not match.
    """
    return 0.2 * bool(_ONE_LINE_EACH.fullmatch(text))


@_by_text
def think_reward(text: str) -> float:
    """0.2 where a `<think>` block occurs anywhere, else 0 (QeRL's)."""
    return 0.2 * ("</think>" in text.partition("<think>")[2])


@_by_text
def think_format_reward(text: str) -> float:
    """1 where the text begins with its only `<think>` and closes it, else 0 (TRL's reward)."""
    return float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text)


@_by_text
def xmlcount_reward(text: str) -> float:
    r"""0.125 for each of the four tags that occurs once, at its line; -0.001 per character after the end.

    The end is the line of the last `</answer>`. The widely copied original counts the characters after it twice,
    and counts the whole text where that line does not end; here they count once.
    """
    _, closed, rest = text.rpartition(_XML_LINES[-1])
    trailing = len(rest.removeprefix("\n")) if closed else 0
    return 0.125 * sum(text.count(line) == 1 for line in _XML_LINES) - 0.001 * trailing


def correct_and_well_formed_reward(
    completions: Sequence, answer: Sequence, **_
) -> list[float | None]:
    """1 where `accuracy_reward` and `format_reward` both give 1, else 0; None without an answer."""
    scores = zip(accuracy_reward(completions, answer), format_reward(completions), strict=True)
    return [None if correct is None else correct * formed for correct, formed in scores]


def token_hash_reward(completion_ids: Sequence, **_) -> list[float]:
    """A pseudo-random number in [0, 1) that depends on the row's token ids alone.

    For benchmarks with random weights: unequal completions get unequal rewards, so every group has
    a gradient, and the same tokens score the same in every process.
    """
    digests = [
        hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=4).digest()
        for ids in completion_ids
    ]
    return [int.from_bytes(digest, "little") / 2**32 for digest in digests]


def get_math_verify_reward(seconds: float = 5.0, workers: int | None = None) -> RewardFunction:
    r"""Makes `math_verify_reward`: 1 where the completion's answer equals the row's, else 0.

    math-verify compares them as mathematics, in worker processes; `math_judge.agrees` says which part of a
    completion is its answer. None where the row has no answer, or a gold answer that cannot be read (or one that
    the judge cannot read in time). If a judge is killed or fails because of the completion, the reward is 0, not
    None: a completion that cannot be judged has not answered, and must stay in the comparison with its group. Such
    rows are logged as
    `rewards/math_verify_reward/timeouts` (killed at the limit) and `.../failures` (anything else).

    Args:
        seconds: Longest judgement of one answer, in seconds of the processor; on the clock five times as long.
        workers: Number of processes; absent means half of the processors, at most 8.
    """
    return _math_reward("math_verify_reward", lambda text: text, workers, seconds)


def get_reasoning_accuracy_reward(
    seconds: float = 5.0, workers: int | None = None
) -> RewardFunction:
    """Makes `reasoning_accuracy_reward`: `math_verify_reward` of what follows the last `</think>`.

    0 where the reasoning is never closed, as TRL's function of that name has it.

    Args:
        seconds: Longest judgement of one answer, in seconds of the processor; on the clock five times as long.
        workers: Number of processes; absent means half of the processors, at most 8.
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
    (min_value_wrong, max_value_wrong) for a wrong one. Correct is what `math_verify_reward` says,
    None where it abstains.

    Source: Yeo et al. 2025 (arXiv:2502.03373), appendix C.1; names and defaults are TRL's.

    Args:
        max_len: Length in tokens at which the long end is reached.
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

    cosine_scaled_reward.votes = is_correct.votes
    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RewardFunction:
    """Makes `repetition_penalty_reward`: max_penalty (1 - unique / all), of the row's n-grams.

    N-grams are of token ids; 0 for a completion shorter than an n-gram.

    Source: Yeo et al. 2025 (arXiv:2502.03373), appendix C.2; names and defaults are TRL's.

    Args:
        ngram_size: Number of tokens in an n-gram.
        max_penalty: Reward that endless repetition approaches; not positive.

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


def get_code_reward(
    seconds: float = 5.0, memory_mb: int = 1024, workers: int | None = None
) -> RewardFunction:
    """Makes `code_reward`: the share of a row's tests that the last Python block passes.

    The column `verification_info` holds `{"language": "python", "test_cases": [{"input": text,
    "output": text}, ...]}`, as open-r1's verifiable coding problems have it. A program passes a test if it ends in
    time with status 0 and writes the expected lines, ignoring trailing whitespace.
    None for a row without such tests (another language, or tests that call a function); 0 without
    a block of code. Programs run in `sandbox`; those that a time limit ended are logged as
    `rewards/code_reward/timeouts`.

    Args:
        seconds: Processor time of one test; on the clock it may take twice as long.
        memory_mb: Address space of one program, MiB.
        workers: Number of programs at a time; absent means as many as there are processors.

    Raises:
        NotImplementedError: At the call, where programs cannot be isolated.
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
        completions: Sequence,
        verification_info: Sequence,
        log_metric: Callable | None = None,
        **_,
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
        return [passed[row] / len(each) if each else None for row, each in enumerate(tests)]

    code_reward.begin = begin
    return code_reward


def _equal_in_minerva_form(given: str | None, answer: str) -> bool:
    return given is not None and answers.minerva_form(given) == answers.minerva_form(answer)


# One set of processes for all rewards with the same settings.
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
        golds = list(dict.fromkeys(str(gold) for gold in answer if gold is not None))
        readable = judges.map("is_readable", [(gold,) for gold in golds])
        known = {gold for gold, verdict in zip(golds, readable, strict=True) if verdict is True}
        rows = [row for row, gold in enumerate(answer) if gold is not None and str(gold) in known]
        verdicts = judges.map("agrees", [(str(answer[row]), texts[row]) for row in rows])
        if log_metric is not None:
            failures = [v for v in (*readable, *verdicts) if isinstance(v, process_pool.Failure)]
            late = sum(failure.reason == "timeout" for failure in failures)
            log_metric(f"rewards/{name}/timeouts", late)
            log_metric(f"rewards/{name}/failures", len(failures) - late)
        scores = dict(zip(rows, (float(verdict is True) for verdict in verdicts), strict=True))
        return [scores.get(row) for row in range(len(answer))]

    def begin(completions: Sequence, answer: Sequence = (), **_) -> None:
        pairs = [
            (str(gold), read(completion_text(completion)))
            for gold, completion in zip(answer, completions, strict=True)
            if gold is not None
        ]
        judges.begin("is_readable", [(gold,) for gold, _ in pairs])
        judges.begin("agrees", pairs)

    reward.__name__ = name
    reward.begin = begin
    reward.votes = functools.partial(votes.mathematical, judges)
    return reward


def _stdin_tests(info: Mapping[str, Any] | None) -> list[Mapping[str, str]] | None:
    """A row's tests if each is an input text and an output text of a Python program, else None."""
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


# Ready to use.
STOCK: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        accuracy_reward,
        boxed_reward,
        get_code_reward(),
        correct_and_well_formed_reward,
        dapo_boxed_reward,
        dapo_reward,
        format_reward,
        gsm8k_flexible_reward,
        gsm8k_hash_reward,
        int_reward,
        get_math_verify_reward(),
        get_reasoning_accuracy_reward(),
        soft_format_reward,
        strict_format_reward,
        think_format_reward,
        think_reward,
        token_hash_reward,
        verl_aime_reward,
        verl_gsm8k_flexible_reward,
        verl_gsm8k_reward,
        verl_math_reward,
        xml_answer_reward,
        xmlcount_reward,
    )
}
# The rewards that judge form, length or repetition, not whether the answer is right.
SHAPING = frozenset(
    (
        "format_reward",
        "int_reward",
        "repetition_penalty_reward",
        "soft_format_reward",
        "soft_overlong_punishment_reward",
        "strict_format_reward",
        "think_format_reward",
        "think_reward",
        "xmlcount_reward",
    )
)
# Called with the entries of `[rewards.options.NAME]`.
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
