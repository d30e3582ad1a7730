"""A reward model: a Hugging Face sequence classifier that reads prompt and response.

    one label         its logit, as reward models are trained to give it
    several labels    the probability of the label that the recipe names

The model is frozen, in eval mode, on the trainer's device, and scores in batches that are padded
on the right. It reads the two texts through its own chat template where it has one, otherwise as a
text pair, so that its tokenizer puts whatever it wants between them. What is longer than its own
limit loses tokens at the beginning, so the end of the response is always read; that is said once.

Weights come from safetensors; code that came with a model is never run; and a checkpoint without
classifier weights is refused, because transformers would fill in random ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from autotune.errors import InputError
from autotune.trainer.models import no_progress_bars, refuse_remote_code
from autotune.trainer.rewards.base import Score, Surroundings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from autotune.recipe.schema import ModelReward
    from autotune.trainer.tasks import Example, TaskData

NO_LIMIT = 1 << 24
"""Tokens; tokenizers without a limit of their own say something like 10^30."""


def classifier(section: ModelReward, task: TaskData, around: Surroundings, name: str) -> Classifier:
    """Loads the reward model.

    Raises:
        InputError: it cannot be loaded, is no classifier, or its label is not named.
    """
    with no_progress_bars():
        model, tokenizer = _load(section, torch.device(around.device))
    return Classifier(
        model,
        tokenizer,
        label=_label(section, model),
        template=_template(section, tokenizer),
        max_length=_limit(section, model, tokenizer),
        batch=section.batch_size,
    )


class Classifier:
    """`Scorer` around a sequence classifier."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        label: int | None,
        template: str,
        max_length: int,
        batch: int,
    ) -> None:
        self._model = model.eval().requires_grad_(False)
        self._tokenizer = tokenizer
        self._label = label
        self._template = template
        self._max_length = max_length
        self._batch = batch
        self.remarks: list[str] = []

    @torch.no_grad()
    def __call__(self, responses: Sequence[str], examples: Sequence[Example]) -> list[Score]:
        encoded = [self._encode(*pair) for pair in zip(examples, responses, strict=True)]
        order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]["input_ids"]))  # least padding
        scores: list[Score] = [0.0] * len(encoded)
        for start in range(0, len(order), self._batch):
            part = order[start : start + self._batch]
            for index, score in zip(part, self._forward([encoded[i] for i in part]), strict=True):
                scores[index] = score
        return scores

    def _forward(self, encoded: list[dict[str, list[int]]]) -> list[float]:
        batch = self._tokenizer.pad(encoded, padding=True, return_tensors="pt").to(self._model.device)
        logits: Tensor = self._model(**batch).logits.float()  # [B, labels]
        if self._label is None:
            return logits[:, 0].tolist()  # type: ignore[no-any-return]
        several = self._model.config.problem_type == "multi_label_classification"
        shares = logits.sigmoid() if several else logits.softmax(dim=1)  # [B, labels]
        return shares[:, self._label].tolist()  # type: ignore[no-any-return]

    def _encode(self, example: Example, response: str) -> dict[str, list[int]]:
        whole = self._tokens(example, response, {})
        if len(whole["input_ids"]) <= self._max_length:
            return whole
        self._note_cut()
        return self._tokens(example, response, {"truncation": "only_first", "max_length": self._max_length})

    def _tokens(self, example: Example, response: str, cut: dict[str, Any]) -> dict[str, list[int]]:
        """Cut on the left (`truncation_side`); of a pair the prompt, while some of it can be left."""
        if self._template == "response" or (cut and self._template == "pair" and self._fills(response)):
            return dict(self._tokenizer(response, **cut))
        if self._template == "pair":
            return dict(self._tokenizer(example.prompt, response, **cut))
        messages = example.messages or ({"role": "user", "content": example.prompt},)
        spoken = [*messages, {"role": "assistant", "content": response}]
        text = self._tokenizer.apply_chat_template(spoken, tokenize=False)
        return dict(self._tokenizer(text, add_special_tokens=False, **cut))

    def _fills(self, response: str) -> bool:
        """Whether the response leaves no room for any of the prompt."""
        added = self._tokenizer.num_special_tokens_to_add(pair=True)
        return len(self._tokenizer.tokenize(response)) + added >= self._max_length

    def _note_cut(self) -> None:
        if not self.remarks:
            self.remarks.append(f"texts of more than {self._max_length} tokens lose their beginning")


def _load(
    section: ModelReward, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    folder = Path(section.path).expanduser()
    source = str(folder) if folder.is_dir() else section.path
    try:
        refuse_remote_code(source, "rewards")
        model, found = AutoModelForSequenceClassification.from_pretrained(
            source,
            dtype=_dtype(section, device),
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, truncation_side="left")
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"rewards: {source} cannot be loaded as a reward model: {error}\nExpected a sequence"
            " classifier with safetensors weights and its tokenizer, as save_pretrained writes them"
        ) from error
    if found["missing_keys"]:
        missing = ", ".join(sorted(found["missing_keys"])[:3])
        raise InputError(
            f"rewards: {source} has no weights for {missing}: it was not trained as a sequence"
            " classifier, so its scores would be random; give a reward model"
        )
    return _padded(model, tokenizer).to(device), tokenizer


def _dtype(section: ModelReward, device: torch.device) -> torch.dtype:
    if section.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return torch.bfloat16 if section.dtype == "bfloat16" else torch.float32


def _padded(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A decoder finds its last token by the padding id, which both must agree on."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    model.config.pad_token_id = tokenizer.pad_token_id
    return model


def _label(section: ModelReward, model: PreTrainedModel) -> int | None:
    names = {index: str(text) for index, text in model.config.id2label.items()}
    known, given = ", ".join(names.values()), section.label
    if len(names) == 1 and given is not None:
        raise InputError(
            f"rewards: {section.path} has one label, {known}, whose logit is the reward;"
            f" received label: {given}; remove it"
        )
    if len(names) == 1:
        return None
    found = [i for i, text in names.items() if given is not None and str(given) in (text, str(i))]
    if not found:
        raise InputError(
            f"rewards: {section.path} has the labels {known}; received label: {given};"
            " expected the one whose probability is the reward"
        )
    return found[0]


def _template(section: ModelReward, tokenizer: PreTrainedTokenizerBase) -> str:
    if section.template == "chat" and not tokenizer.chat_template:
        raise InputError(
            f"rewards: the tokenizer of {section.path} has no chat template;"
            " expected template: pair, or auto"
        )
    if section.template == "auto":
        return "chat" if tokenizer.chat_template else "pair"
    return section.template


def _limit(section: ModelReward, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Tokens that the model can read; the recipe may lower them."""
    own = min(_limits(model, tokenizer), default=NO_LIMIT)
    if section.max_length is not None and section.max_length > own:
        raise InputError(
            f"rewards: max_length is {section.max_length}, but {section.path} reads at most {own} tokens"
        )
    return section.max_length or own


def _limits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    positions = getattr(model.config, "max_position_embeddings", None)
    if isinstance(positions, int) and positions > 0:
        yield positions
    if tokenizer.model_max_length < NO_LIMIT:
        yield int(tokenizer.model_max_length)
