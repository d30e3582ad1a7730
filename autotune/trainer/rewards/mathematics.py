"""Mathematical equality by the package math-verify; imported by a worker process only.

The answer is given, so it is read strictly: text without math delimiters is taken as one formula
(read loosely, `2\\sqrt{2}` would be 2), unless it is a sentence or a plain number. A response is read
as math-verify does by default: the last boxed or otherwise recognisable expression counts.

math-verify's own time limits need signals and turn a hang into a wrong answer, so they are off: the
process is ended from outside, and the response is not scorable.
"""

from __future__ import annotations

import logging
import re
from decimal import Decimal, InvalidOperation
from functools import lru_cache
from typing import Any

from math_verify import parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # its remark that time limits are off

DELIMITED = re.compile(r"\$|\\\(|\\\[|\\boxed|####")
SENTENCE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}\s+\S")
"""A word and something behind it: prose with a number in it, no formula."""


def score(responses: list[str], answers: list[str]) -> list[float | None]:
    """1 where a response's expression equals its answer's; None where the answer has no expression."""
    return [_equal(*pair) for pair in zip(answers, responses, strict=True)]


def _equal(answer: str, response: str) -> float | None:
    gold = _gold(answer)
    if not gold:
        return None
    found = parse(response, parsing_timeout=None)
    return float(verify(gold, found, timeout_seconds=None))


@lru_cache(maxsize=4096)
def _gold(answer: str) -> list[Any]:
    answer = _positional(answer.strip())
    formula = f"${answer}$"
    loose = DELIMITED.search(answer) or SENTENCE.search(answer) or re.fullmatch(r"[-+]?[\d.,]+", answer)
    first, second = (answer, formula) if loose else (formula, answer)
    return parse(first, parsing_timeout=None) or parse(second, parsing_timeout=None)


def _positional(answer: str) -> str:
    """`1e-5` is a number here, and neither 1 nor a formula with the letter e."""
    if "e" not in answer.lower():
        return answer
    try:
        return format(Decimal(answer), "f")
    except InvalidOperation:
        return answer
