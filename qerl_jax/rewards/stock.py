r"""The stock of verifiable rewards, in the signature that `scoring` describes.

Correctness: what is compared is what `data.answers` finds; `math_verify_reward` asks a computer algebra
system, `code_reward` runs the program. Form: think/answer tags. Length and repetition: factories
under TRL's names, configured by `[rewards.options.NAME]`; DAPO's overlong punishment is `grpo`'s.
"""

import functools
import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.data import answers
from qerl_jax.rewards import process_pool, sandbox

type RewardFunction = Callable[..., Any]

_TAG = r"</?(?:think|answer)>"
_WELL_FORMED = re.compile(
    rf"\s*<think>(?:(?!{_TAG}).)*</think>\s*<answer>(?:(?!{_TAG}).)*</answer>\s*", re.DOTALL
)
_ONE_LINE_EACH = re.compile(r"<think>\n.*\n</think>\n<answer>\n.*\n</answer>\n")
_BETWEEN_BLOCKS = re.compile(r"</think>\s*<answer>")
_XML_LINES = ("<think>\n", "\n</think>\n", "\n<answer>\n", "\n</answer>")
# DAPO's scorer reads no more than the end (verl's math_dapo).
_DAPO_TAIL, _DAPO_BOXED_TAIL = 300, 100


def completion_text(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a completion in either form: a string, or the last message of a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def accuracy_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    """1 where the last `<answer>` block holds the row's answer, else 0; None without an answer.

    Numbers are compared by value ("$1,234.00" is "1234"), anything else as stripped text.
    """
    return _compare(answers.last_block, completions, answer)


def gsm8k_hash_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    """1 where the number after the last `####` is the row's answer, else 0 (GSM8K's own form)."""
    return _compare(answers.after_hashes, completions, answer)


def gsm8k_flexible_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    """1 where the last number of the text is the row's answer, whatever its form, else 0."""
    return _compare(answers.last_number, completions, answer)


def boxed_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    r"""1 where the last `\boxed{}` holds the row's answer by value or in Minerva's form, else 0."""

    def judge(text: str, expected: str) -> float:
        given = answers.last_boxed(text)
        if given is None:
            return 0.0
        equal = answers.minerva_form(given) == answers.minerva_form(expected)
        return float(equal or answers.same(given, expected))

    return _judge(judge, completions, answer)


def dapo_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    """1 where the last "Answer: ..." is the row's answer in Minerva's form, else 0.

    Only the last 300 characters are read. DAPO itself gives -1 for a wrong answer
    (arXiv:2503.14476, equation 7); QeRL replaced it by 0.
    """

    def judge(text: str, expected: str) -> float:
        line = answers.answer_line(text[-_DAPO_TAIL:])
        return float(
            line is not None and answers.minerva_form(line) == answers.minerva_form(expected)
        )

    return _judge(judge, completions, answer)


def dapo_boxed_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    r"""1 where the last `\boxed{}` of the last 100 characters holds the row's answer to the letter.

    DAPO's strict variant; 0 elsewhere.
    """
    judge = lambda text, expected: float(answers.last_boxed(text[-_DAPO_BOXED_TAIL:]) == expected)
    return _judge(judge, completions, answer)


def xml_answer_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    """2 where the tagged answer is the row's to the letter, else 0; see `answers.tagged`.

    QeRL's GSM8K reward (its published code).
    """
    judge = lambda text, expected: 2.0 * (answers.tagged(text) == expected)
    return _judge(judge, completions, answer)


def int_reward(completions: Sequence, **_) -> list[float]:
    """0.2 where the tagged answer has digits only, else 0 (QeRL's)."""
    return [0.2 * answers.tagged(completion_text(c)).isdigit() for c in completions]


def format_reward(completions: Sequence, **_) -> list[float]:
    """1 for one `<think>` block, then one `<answer>` block, and only space around them; else 0."""
    return [float(_WELL_FORMED.fullmatch(completion_text(c)) is not None) for c in completions]


def soft_format_reward(completions: Sequence, **_) -> list[float]:
    """0.2 where a `<think>` block followed by an `<answer>` block occurs anywhere, else 0.

    QeRL adds it to accuracy (arXiv:2510.11696, its published code).
    """
    return [0.2 * _has_both_blocks(completion_text(c)) for c in completions]


def strict_format_reward(completions: Sequence, **_) -> list[float]:
    """0.2 where every tag has a line of its own, with one line of text in each block, else 0.

    As QeRL's published pattern has it: reasoning of several lines does not match.
    """
    return [0.2 * bool(_ONE_LINE_EACH.fullmatch(completion_text(c))) for c in completions]


def think_reward(completions: Sequence, **_) -> list[float]:
    """0.2 where a `<think>` block occurs anywhere, else 0 (QeRL's)."""
    texts = [completion_text(c) for c in completions]
    return [0.2 * ("</think>" in text.partition("<think>")[2]) for text in texts]


def think_format_reward(completions: Sequence, **_) -> list[float]:
    """1 where the text begins with its only `<think>` and closes it, else 0 (TRL's reward)."""
    texts = [completion_text(c) for c in completions]
    return [
        float(t.startswith("<think>") and t.count("<think>") == 1 and "</think>" in t)
        for t in texts
    ]


def xmlcount_reward(completions: Sequence, **_) -> list[float]:
    r"""0.125 for each of the four tags that stands once at its line; -0.001 per character after.

    "After" is what follows the line of the last `</answer>`. The widely copied original counts
    these characters twice, and all of the text where that line does not end; here once.
    """

    def judge(text: str) -> float:
        _, closed, rest = text.rpartition(_XML_LINES[-1])
        trailing = len(rest.removeprefix("\n")) if closed else 0
        return 0.125 * sum(text.count(line) == 1 for line in _XML_LINES) - 0.001 * trailing

    return [judge(completion_text(c)) for c in completions]


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


def get_math_verify_reward(seconds: float = 10.0, workers: int | None = None) -> RewardFunction:
    r"""Makes `math_verify_reward`: 1 where the completion's answer equals the row's, else 0.

    math-verify compares them as mathematics, in worker processes; `math_judge.agrees` says what of
    a completion is taken for its answer. None where the row has no answer or a gold answer that
    cannot be read (a judge killed over the gold answer alone counts as that). A judge that is
    killed or fails over the completion gives 0, not None: whoever writes what cannot be judged has
    not answered, and must not escape the comparison with its group. Such rows are logged as
    `rewards/math_verify_reward/timeouts` (killed at the limit) and `.../failures` (anything else).

    Args:
        seconds: Longest judgement of one answer, on the clock.
        workers: Number of processes; absent means half of the processors, at most 8.
    """
    judges = _math_judges(workers, seconds)

    def math_verify_reward(
        completions: Sequence, answer: Sequence, log_metric: Callable | None = None, **_
    ) -> list[float | None]:
        texts = [completion_text(completion) for completion in completions]
        return _judge_as_mathematics(judges, texts, answer, math_verify_reward, log_metric)

    return math_verify_reward


def get_reasoning_accuracy_reward(
    seconds: float = 10.0, workers: int | None = None
) -> RewardFunction:
    """Makes `reasoning_accuracy_reward`: `math_verify_reward` of what follows the last `</think>`.

    0 where the reasoning is never closed, as TRL's function of that name has it.

    Args:
        seconds: Longest judgement of one answer, on the clock.
        workers: Number of processes; absent means half of the processors, at most 8.
    """
    judges = _math_judges(workers, seconds)

    def reasoning_accuracy_reward(
        completions: Sequence, answer: Sequence, log_metric: Callable | None = None, **_
    ) -> list[float | None]:
        parts = [completion_text(completion).rpartition("</think>") for completion in completions]
        said = [rest if closed else "" for _, closed, rest in parts]
        return _judge_as_mathematics(judges, said, answer, reasoning_accuracy_reward, log_metric)

    return reasoning_accuracy_reward


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
    if max_len < 1:
        raise ValueError(f"max_len: got {max_len}; must be at least 1")
    is_correct = get_math_verify_reward()

    def cosine_scaled_reward(
        completions: Sequence, answer: Sequence, completion_ids: Sequence, **extras
    ) -> list[float | None]:
        def scale(correct: float | None, tokens: int) -> float | None:
            if correct is None:
                return None
            short, long = (
                (max_value_correct, min_value_correct)
                if correct
                else (min_value_wrong, max_value_wrong)
            )
            turn = math.cos(math.pi * min(tokens / max_len, 1.0))
            return long + (short - long) * (1 + turn) / 2

        correct = is_correct(completions, answer, **extras)
        return [scale(c, len(ids)) for c, ids in zip(correct, completion_ids, strict=True)]

    return cosine_scaled_reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RewardFunction:
    """Makes `repetition_penalty_reward`: max_penalty (1 - unique / all), of the row's n-grams.

    N-grams are of token ids; 0 for a completion shorter than one.

    Source: Yeo et al. 2025 (arXiv:2502.03373), appendix C.2; names and defaults are TRL's.

    Args:
        ngram_size: Number of tokens in an n-gram.
        max_penalty: Reward that endless repetition approaches; not positive.

    Raises:
        ValueError: If `ngram_size` is not positive or `max_penalty` is.
    """
    if ngram_size < 1:
        raise ValueError(f"ngram_size: got {ngram_size}; must be at least 1")
    if max_penalty > 0:
        raise ValueError(f"max_penalty: got {max_penalty}; must not be positive")

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
    "output": text}, ...]}`, as open-r1's verifiable coding problems have it. A test is passed by a
    program that ends in time with status 0 and writes the expected lines, trailing space aside.
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
    limits = sandbox.Limits(seconds, memory_mb)

    def code_reward(
        completions: Sequence,
        verification_info: Sequence,
        log_metric: Callable | None = None,
        **_,
    ) -> list[float | None]:
        tests = [_stdin_tests(info) for info in verification_info]
        programs = [answers.last_code(completion_text(completion)) for completion in completions]
        jobs = [
            (row, program, test)
            for row, (program, row_tests) in enumerate(zip(programs, tests, strict=True))
            if program is not None
            for test in row_tests or ()
        ]
        pairs = [(program, test["input"]) for _, program, test in jobs]
        outcomes = sandbox.run_all(pairs, limits, workers=workers)
        passed = [0] * len(programs)
        for (row, _, test), outcome in zip(jobs, outcomes, strict=True):
            right = _lines(outcome.output) == _lines(test["output"])
            passed[row] += outcome.status == "ok" and right
        if log_metric is not None:
            late = sum(outcome.status == "timeout" for outcome in outcomes)
            log_metric("rewards/code_reward/timeouts", late)
        return [n / len(t) if t else None for n, t in zip(passed, tests, strict=True)]

    return code_reward


def _judge(
    judge: Callable[[str, str], float], completions: Sequence, expected: Sequence
) -> list[float | None]:
    return [
        None if answer is None else judge(completion_text(completion), str(answer))
        for completion, answer in zip(completions, expected, strict=True)
    ]


def _compare(
    find: Callable[[str], str | None], completions: Sequence, expected: Sequence
) -> list[float | None]:
    judge = lambda text, answer: answers.same(find(text), answer)
    return _judge(judge, completions, expected)


def _has_both_blocks(text: str) -> bool:
    # The first place of each tag in turn decides, so this stays linear in the text: one pattern
    # with three wildcards would take seconds on a model that repeats its tags.
    _, think, rest = text.partition("<think>")
    between = _BETWEEN_BLOCKS.search(rest)
    return bool(think and between and "</answer>" in rest[between.end() :])


# One set of processes for all rewards with the same settings.
@functools.cache
def _math_judges(workers: int | None, seconds: float) -> process_pool.Pool:
    if workers is None:
        workers = min(8, max(1, (os.cpu_count() or 1) // 2))
    return process_pool.Pool("qerl_jax.rewards.math_judge", workers=workers, seconds=seconds)


def _judge_as_mathematics(
    judges: process_pool.Pool,
    texts: Sequence[str],
    expected: Sequence,
    reward: RewardFunction,
    log_metric: Callable | None,
) -> list[float | None]:
    golds = list(dict.fromkeys(str(answer) for answer in expected if answer is not None))
    readable = judges.map("is_readable", [(gold,) for gold in golds])
    known = {gold for gold, verdict in zip(golds, readable, strict=True) if verdict is True}
    rows = [row for row, gold in enumerate(expected) if gold is not None and str(gold) in known]
    verdicts = judges.map("agrees", [(str(expected[row]), texts[row]) for row in rows])
    scores: list[float | None] = [None] * len(expected)
    for row, verdict in zip(rows, verdicts, strict=True):
        scores[row] = float(verdict is True)
    if log_metric is not None:
        failures = [v for v in (*readable, *verdicts) if isinstance(v, process_pool.Failure)]
        late = sum(failure.reason == "timeout" for failure in failures)
        log_metric(f"rewards/{reward.__name__}/timeouts", late)
        log_metric(f"rewards/{reward.__name__}/failures", len(failures) - late)
    return scores


def _stdin_tests(info: Mapping[str, Any] | None) -> list[Mapping[str, str]] | None:
    """A row's tests if all are texts in and out of a Python program, else None."""
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
        xml_answer_reward,
        xmlcount_reward,
    )
}
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
