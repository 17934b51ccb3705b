import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
import transformers

from qerl_jax.data import arithmetic

TINY = pathlib.Path(arithmetic.__file__).parents[1] / "assets" / "tiny"
TRAIN = [arithmetic.problem("train", 0, index) for index in range(2000)]
TEST = [arithmetic.problem("test", 0, index) for index in range(500)]
MARBLES = arithmetic.ArithmeticProblem("How many?", 55, (("+", 8), ("-", 3), ("-", 29)))


def test_worked_answer_shows_one_line_per_operation():
    assert MARBLES.answer == 31
    assert arithmetic.worked_answer(MARBLES) == (
        "<think>55+8=63\n63-3=60\n60-29=31</think><answer>31</answer>"
    )


def test_faulty_answers_are_faulty_in_the_way_they_say():
    faults = {
        "blurt": "<think>Easy.</think><answer>31</answer>",
        "short": "<think>55+8=63\n63-3=60</think><answer>60</answer>",
        "untagged": "<think>55+8=63\n63-3=60\n60-29=31</think>31",
    }
    answered = {kind: arithmetic.faulty_answer(MARBLES, kind, random.Random(0)) for kind in faults}
    assert answered == faults
    with pytest.raises(ValueError, match="kind='rude'"):
        arithmetic.faulty_answer(MARBLES, "rude", random.Random(0))


def test_a_slip_errs_in_one_line_and_in_the_answer():
    rng = random.Random(0)
    for problem in TRAIN[:300]:
        text = arithmetic.faulty_answer(problem, "slip", rng)
        match = re.fullmatch(r"<think>(.*)</think><answer>(\d+)</answer>", text, re.DOTALL)
        work, answer = match.groups()
        lines = [line.split("=") for line in work.split("\n")]
        wrong = [left for left, right in lines if eval(left) != int(right)]
        assert len(wrong) == 1 and int(answer) != problem.answer
        assert answer == lines[-1][1]


@pytest.mark.parametrize("draw", [arithmetic.problem, arithmetic.one_step, arithmetic.mixed])
def test_an_unknown_split_is_named(draw):
    with pytest.raises(ValueError, match="split='dev'"):
        draw("dev", 0, 0)


def test_problems_are_the_same_in_every_process():
    question = arithmetic.problem("train", 3, 12).question
    program = "from qerl_jax.data import arithmetic as a; "
    program += f"assert a.problem('train', 3, 12).question == {question!r}"
    options = {"cwd": TINY.parents[2], "env": {"PYTHONHASHSEED": "7"}}
    subprocess.run([sys.executable, "-c", program], check=True, **options)
    # Held in place: a changed generator would make the packaged base and published runs unequal.
    assert arithmetic.problem("train", 0, 0).question == (
        "Ida has 11 coins. Ida wins 10 more, finds 2 more and triples the total. "
        "How many coins does Ida have now?"
    )


def test_numbers_stay_within_the_stated_ranges():
    for problem in TRAIN + TEST:
        assert 5 <= problem.start <= 60 and len(problem.operations) in (2, 3)
        assert min(problem.values) >= 1
        for (sign, operand), before in zip(problem.operations, problem.values, strict=False):
            assert (operand in (2, 3) and before <= 33) if sign == "*" else 2 <= operand <= 40


def test_questions_say_what_their_numbers_say():
    expressions = [p for p in TRAIN if p.question.startswith("What is ")]
    assert 0.2 < len(expressions) / len(TRAIN) < 0.3
    for problem in expressions:
        assert eval(problem.question[len("What is ") : -1]) == problem.answer
    for problem in (p for p in TRAIN if p not in expressions):
        digits = [int(number) for number in re.findall(r"\d+", problem.question)]
        told = [operand for sign, operand in problem.operations if sign != "*"]
        assert digits == [problem.start, *told]


def test_training_never_meets_the_held_out_tenth():
    assert all(arithmetic.is_held_out(p.start, p.operations) for p in TEST)
    assert not any(arithmetic.is_held_out(p.start, p.operations) for p in TRAIN)
    held_out = sum(
        arithmetic.is_held_out(start, (("+", plus), ("-", minus)))
        for start in range(5, 61)
        for plus in range(2, 41)
        for minus in range(2, 41)
    )
    assert held_out / (56 * 39 * 39) == pytest.approx(0.1, abs=0.005)


def test_one_step_problems_are_small_say_their_numbers_and_keep_the_splits_apart():
    drawn = {
        split: [arithmetic.one_step(split, 0, index) for index in range(8000)]
        for split in ("train", "test")
    }
    asked = {split: {problem.question for problem in found} for split, found in drawn.items()}
    assert not asked["train"] & asked["test"]
    assert len(asked["train"] | asked["test"]) == 396
    assert len(asked["test"]) / 396 == pytest.approx(0.1, abs=0.03)
    for problem in drawn["train"] + drawn["test"]:
        ((sign, operand),) = problem.operations
        assert problem.question == f"What is {problem.start} {sign} {operand}?"
        assert eval(problem.question[len("What is ") : -1]) == problem.answer >= 1
        assert operand <= 9 and problem.start <= (9 if sign == "*" else 20)
    assert drawn["train"][:20] != [arithmetic.one_step("train", 1, index) for index in range(20)]


def test_mixed_problems_are_of_four_kinds_told_in_digits_words_or_a_story():
    found = [arithmetic.mixed("train", 0, index) for index in range(2000)]
    asked = [problem.question for problem in found]
    assert asked[0] == "What is six plus four?" and found[0].answer == 10
    assert asked[8] == "What is 43+43?" and asked[9] == "What is 14+39+32?"
    assert asked[1] == "Mia has 27 stamps. Mia buys 85 more. How many stamps does Mia have now?"
    assert asked[26] == (
        "Start with forty-nine, add twenty-seven and add thirty-eight. What is the result?"
    )
    digits = [problem for problem in found if problem.question.startswith("What is ")]
    digits = [problem for problem in digits if re.search(r"\d", problem.question)]
    assert all(eval(p.question[len("What is ") : -1]) == p.answer >= 1 for p in digits)
    spoken = [text for text in asked if not re.search(r"\d", text)]
    assert 0.3 < len(digits) / 2000 < 0.4 and 0.3 < len(spoken) / 2000 < 0.4
    for first in range(0, 2000, 20):
        several = [p for p in found[first : first + 20] if len(p.operations) > 1]
        ones = [p for p in found[first : first + 20] if len(p.operations) == 1]
        small = [p for p in ones if p.operations[0][0] != "*" and p.start < 10]
        assert len(several) == 9 and len(small) == 3
        assert sum(p.operations[0][0] == "*" for p in ones) == 2


def test_mixed_problems_of_the_two_splits_have_other_numbers():
    drawn = [[arithmetic.mixed(split, 0, i) for i in range(4000)] for split in ("train", "test")]
    train, test = ({(p.start, p.operations) for p in problems} for problems in drawn)
    assert not train & test
    # Of the kinds that are few all were met: 117 sums and differences, 88 products.
    few = [
        (start, operations)
        for start, operations in train | test
        if len(operations) == 1 and (operations[0][0] == "*" or start < 10)
    ]
    assert len(few) == 117 + 88


def test_numbers_in_words():
    said = [arithmetic.in_words(number) for number in range(100)]
    assert len(set(said)) == 100
    assert [said[n] for n in (0, 13, 20, 41, 99)] == [
        *("zero", "thirteen", "twenty", "forty-one", "ninety-nine")
    ]


def test_a_plain_answer_ends_with_the_result():
    assert arithmetic.plain_answer(MARBLES) == "55+8=63\n63-3=60\n60-29=31\nThe answer is 31."


def test_both_splits_have_the_same_kinds_of_problems():
    def shares(problems):
        return (
            sum(len(p.operations) == 3 for p in problems) / len(problems),
            sum(sign == "*" for p in problems for sign, _ in p.operations) / len(problems),
        )

    # Standard errors are .02 and .03 for 500 problems.
    assert shares(TEST) == pytest.approx(shares(TRAIN), abs=0.1)


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(TINY)


def test_tiny_tokenizer_decodes_exactly(tokenizer):
    texts = [arithmetic.worked_answer(p) for p in TRAIN[:200]] + [p.question for p in TRAIN[:200]]
    others = [" two  spaces\n\n", "naïve 漢字 🙂 don't", "<think></think><answer>-1.5</answer>"]
    for text in texts + others:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tiny_tokenizer_keeps_tags_and_drops_chat_marks(tokenizer):
    ids = tokenizer.encode("<think>1+2=3</think><answer>3</answer><|im_end|><|endoftext|>")
    assert len(ids) == 4 + 5 + 1 + 2  # four tags, digits and signs one by one, two marks
    kept = tokenizer.decode(ids, skip_special_tokens=True)
    assert kept == "<think>1+2=3</think><answer>3</answer>"
    assert ids[-2:] == [tokenizer.eos_token_id, tokenizer.pad_token_id]


def test_problems_and_answers_fit_the_quickstart_buffers(tokenizer):
    def chat(problem):
        messages = [{"role": "user", "content": problem.question}]
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    problems = TRAIN[:500]
    assert max(len(tokenizer.encode(chat(p))) for p in problems) <= 56
    assert max(len(tokenizer.encode(arithmetic.worked_answer(p))) + 1 for p in problems) <= 44


@pytest.mark.slow
def test_tiny_tokenizer_is_small_and_is_its_script_s_output():
    from scripts import make_tiny_base

    made = json.loads(make_tiny_base.make_tokenizer().to_str())
    packaged = json.loads((TINY / "tokenizer.json").read_text())
    assert made["model"]["vocab"] == packaged["model"]["vocab"]
    assert made["model"]["merges"] == packaged["model"]["merges"]
    assert len(packaged["model"]["vocab"]) + len(packaged["added_tokens"]) <= 512


def test_tiny_tokenizer_splits_alike_beside_a_qwen2_config(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    for file in TINY.glob("tokenizer*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    as_qwen2 = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for problem in TRAIN[:100]:
        text = problem.question + arithmetic.worked_answer(problem)
        assert as_qwen2.encode(text) == tokenizer.encode(text)
