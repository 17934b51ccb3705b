r"""Whether two answers are the same mathematics, as math-verify sees it.

For worker processes only (`process_pool`): the imports below take seconds, and a hostile
expression can keep a call busy for ever. Its own time limits need the main thread's alarm; ours is
the worker's death.
"""

import functools
import logging
import re

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from qerl_jax.data import answers

# Both tell at every start that their time limits are off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# A dollar sign that is escaped is a currency.
_DELIMITER = re.compile(r"(?<!\\)\$|\\boxed|\\\(|\\\[")


def _latex(*, anywhere: bool) -> list[LatexExtractionConfig]:
    return [
        LatexExtractionConfig(
            # "Malformed" includes what TeX reads well, such as \frac12; many gold answers hold it.
            normalization_config=NormalizationConfig(units=True, malformed_operators=True),
            boxed_match_priority=0,
            try_extract_without_anchor=anywhere,
        )
    ]


_IN_TEXT, _IN_BLOCK = _latex(anywhere=False), _latex(anywhere=True)


def is_readable(gold: str) -> bool:
    """Whether a gold answer can be parsed at all."""
    return len(_gold(gold)) > 0


def agrees(gold: str, completion: str) -> bool:
    r"""Whether a completion's answer equals the gold one.

    The answer is the last `<answer>` block if there is one. Else it is what math-verify finds: the
    last `\boxed{}` (boxes joined by "and" or a comma are one answer), or what the text calls its
    answer in LaTeX ("the final answer is $7$").
    """
    block = answers.last_block(completion)
    if block is not None:
        completion = block if _is_marked(block) else f"\\boxed{{{block}}}"
    given = parse(
        completion,
        extraction_config=_IN_TEXT if block is None else _IN_BLOCK,
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return verify(_gold(gold), given, timeout_seconds=None)


def _is_marked(text: str) -> bool:
    return _DELIMITER.search(text) is not None


# A group shares its gold answer.
@functools.lru_cache(maxsize=64)
def _gold(gold: str) -> list:
    # Without delimiters math-verify looks for plain numbers only, and reads 2\sqrt{3} as 2.
    marked = gold if _is_marked(gold) else f"${gold}$"
    return parse(marked, parsing_timeout=None)
