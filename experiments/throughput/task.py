"""Two-digit sums, the same prompts and scores for every trainer."""

from __future__ import annotations

import re
from typing import Any

TASK = {"type": "sums", "terms": 2, "largest": 99, "prompts": 4096}
REWARD = {"type": "regex", "pattern": r"(\d+)"}


def prompts(tokenizer: Any) -> list[tuple[str, str, int]]:
    """(text, answer, tokens) of every training prompt, wrapped by the chat template where there is one."""
    from autotune.recipe.schema import SumsTask
    from autotune.trainer.tasks import load_task

    data = load_task(SumsTask(**{k: v for k, v in TASK.items() if k != "type"}), tokenizer)
    rows = [(*_text(example.prompt, tokenizer), example.answer) for example in data.train]
    return [(text, answer, size) for text, size, answer in rows]


def _text(question: str, tokenizer: Any) -> tuple[str, int]:
    if tokenizer.chat_template is None:
        return question, len(tokenizer(question)["input_ids"])
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return text, len(tokenizer(text)["input_ids"])


def answered(text: str, answer: str) -> float:
    """1 when the last number in the text is the answer."""
    found = re.findall(REWARD["pattern"], text)
    return float(bool(found) and found[-1] == answer)
