"""A reward model: the numbers are the classifier's own, whatever the batch, and nothing random passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.errors import InputError
from autotune.recipe.schema import ModelReward
from autotune.trainer.builtin import character_tokenizer
from autotune.trainer.rewards import Rewards, build_rewards
from autotune.trainer.tasks.base import Example, TaskData

TASK = TaskData([], [], None, lambda e: [])
CHAT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}>{% endfor %}"
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Folders of tiny decoder classifiers with dropout, which must not be active."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2ForSequenceClassification

    def folder(labels: int = 1, chat: bool = False, language_model: bool = False, **config: Any) -> Path:
        tokenizer = character_tokenizer()
        tokenizer.chat_template = CHAT if chat else None
        torch.manual_seed(11)
        kind = Qwen2ForCausalLM if language_model else Qwen2ForSequenceClassification
        settings = Qwen2Config(
            vocab_size=len(tokenizer),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=24,
            max_position_embeddings=24,
            initializer_range=0.5,
            attention_dropout=0.5,
            **({} if language_model else {"num_labels": labels}),
            **config,
        )
        path = tmp_path_factory.mktemp("rm") / "model"
        kind(settings).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    return folder


def build(path: Path, **fields: Any) -> Rewards:
    return build_rewards([ModelReward(path=str(path), **fields)], TASK)


def logits(path: Path, text: str) -> torch.Tensor:
    """What the model itself says to one text, without padding; [labels]."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    model.config.pad_token_id = character_tokenizer().pad_token_id
    ids = character_tokenizer()(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids).logits[0]
    return found


EXAMPLES = [Example("a12>", ""), Example("d9876543>", ""), Example("a>", "")]
RESPONSES = ["21", "345", "123456"]


def test_one_label_is_its_logit(make: Make) -> None:
    path = make()
    scores = build(path).score(RESPONSES, EXAMPLES).total
    expected = [logits(path, e.prompt + r).item() for e, r in zip(EXAMPLES, RESPONSES, strict=True)]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 3) for score in expected}) == 3  # the texts do make a difference


@pytest.mark.parametrize("batch_size", [1, 2, 32])
def test_the_batch_size_changes_nothing(make: Make, batch_size: int) -> None:
    path = make()
    one = [build(path).score([r], [e]).total[0] for e, r in zip(EXAMPLES, RESPONSES, strict=True)]
    assert build(path, batch_size=batch_size).score(RESPONSES, EXAMPLES).total == pytest.approx(one, abs=1e-5)


def test_several_labels_need_one_named_and_give_its_probability(make: Make) -> None:
    path = make(labels=3, id2label={0: "bad", 1: "fair", 2: "good"})
    with pytest.raises(InputError, match="the labels bad, fair, good; received label: None"):
        build(path)
    expected = logits(path, "a12>21").softmax(dim=0)
    for label, index in (("good", 2), (0, 0)):
        score = build(path, label=label).score(["21"], EXAMPLES[:1]).total[0]
        assert score == pytest.approx(expected[index].item(), abs=1e-5)


def test_one_label_needs_no_name(make: Make) -> None:
    with pytest.raises(InputError, match=r"has one label, .*; received label: good; remove it"):
        build(make(), label="good")


def test_its_own_chat_template_is_used_where_there_is_one(make: Make) -> None:
    path = make(chat=True)
    spoken = Example("?", "", messages=({"role": "system", "content": "1"}, {"role": "user", "content": "2"}))
    scores = build(path).score(["21", "3"], [EXAMPLES[0], spoken]).total
    expected = [logits(path, text).item() for text in ("ua12>>a21>", "s1>u2>a3>")]
    assert scores == pytest.approx(expected, abs=1e-5)
    alone = build(path, template="response").score(["21"], EXAMPLES[:1]).total[0]
    assert alone == pytest.approx(logits(path, "21").item(), abs=1e-5)


def test_a_template_that_is_not_there_cannot_be_used(make: Make) -> None:
    with pytest.raises(InputError, match="has no chat template"):
        build(make(), template="chat")


def test_long_texts_lose_their_beginning_by_the_model_s_own_limit_and_that_is_said_once(make: Make) -> None:
    path = make()
    rewards = build(path, max_length=8)
    scores = rewards.score(["123456", "12"], [EXAMPLES[1], EXAMPLES[2]]).total
    assert scores[0] == pytest.approx(logits(path, "3>123456").item(), abs=1e-5)
    assert scores[1] == pytest.approx(logits(path, "a>12").item(), abs=1e-5)
    rewards.score(["123456"], [EXAMPLES[1]])
    assert [news.text for news in rewards.news()] == ["texts of more than 8 tokens lose their beginning"]
    alone = rewards.score(["123456789"], [EXAMPLES[1]]).total[0]
    assert alone == pytest.approx(logits(path, "23456789").item(), abs=1e-5)
    with pytest.raises(InputError, match=r"max_length is 25, but .* reads at most 24 tokens"):
        build(path, max_length=25)


def test_a_language_model_is_no_reward_model(make: Make) -> None:
    with pytest.raises(InputError, match=r"no weights for score.weight: .*scores would be random"):
        build(make(language_model=True))


def test_code_that_came_with_the_model_is_not_run(make: Make) -> None:
    path = make()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(InputError, match="auto_map"):
        build(path)


def test_it_does_not_train(make: Make) -> None:
    scorer = build(make()).components[0].scorer
    assert not any(p.requires_grad for p in scorer._model.parameters())  # type: ignore[attr-defined]


def test_what_is_no_model_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be loaded as a reward model"):
        build(tmp_path)
