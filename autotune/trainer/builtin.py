"""The built-in models: tiny Qwen2 networks, warm-started in seconds, the same on every machine.

A run needs a model that already does a little, or no sampled group has mixed rewards and there is
nothing to reinforce. So each model gets a short supervised start that is stopped early:

    digits   120 steps on `ops6x2` whose labels obey the letter in 30 % of the cases and show the
             other order otherwise: the model half knows how to sort and mostly disobeys.
             Reinforcement has to teach it to obey and to sharpen the sort.
    sort6    40 steps of plain sorting: reinforcement only has to sharpen.
    unique6  90 steps of dropping repeated digits: answers of several lengths to sharpen.

Everything is seeded and computed on one CPU thread, so the weights do not depend on the number of
cores, and no global random stream is touched. The character tokenizer is saved beside the weights;
the folder is an ordinary one that `from_pretrained` loads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from autotune.trainer.tasks import digits

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz>+-*/=<,.:?"
"""47 characters and no white space: `AutoTokenizer` reads the tokenizer of any Qwen2 folder as
byte-level BPE, and among visible ASCII characters that is the same as one token per character."""
PAD, END = "<pad>", "<end>"
IGNORED = -100
"""Label of positions that carry no loss: the prompt."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """How one built-in model is made; changing a number makes another model (and cache folder)."""

    variant: str
    hidden_size: int
    intermediate_size: int
    steps: int
    obedience: float
    """Share of labels that follow the instruction letter; the others show the opposite order."""
    batch_size: int = 128
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    seed: int = 2


BUILTIN: dict[str, WarmStart] = {
    "digits": WarmStart("ops6x2", 64, 128, steps=120, obedience=0.3),
    "sort6": WarmStart("sort6", 96, 192, steps=40, obedience=1.0),
    "unique6": WarmStart("unique6", 96, 192, steps=90, obedience=1.0),
}


def character_tokenizer() -> PreTrainedTokenizerBase:
    """One token per character, padded on the left as generation needs it."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([PAD, END, *CHARACTERS])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        unk_token=PAD,  # named, or loading would add a token of its own beyond the embedding
        padding_side="left",
    )


def build(name: str) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerBase]:
    """Makes a built-in model from nothing, in about ten seconds."""
    import torch

    recipe, tokenizer = BUILTIN[name], character_tokenizer()
    with _one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = _fresh_model(recipe, tokenizer)
        _supervise(model, tokenizer, recipe)
    return model.eval(), tokenizer


def _fresh_model(recipe: WarmStart, tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def _supervise(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, recipe: WarmStart) -> None:
    """A few supervised steps: linear warm-up from zero, then linearly down to a tenth."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, recipe))
    model.train()
    for input_ids, labels in islice(_batches(tokenizer, recipe), recipe.steps):
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def _factor(step: int, recipe: WarmStart) -> float:
    if step < recipe.warmup_steps:
        return step / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps)
    return 1.0 - 0.9 * done


def _batches(tokenizer: PreTrainedTokenizerBase, recipe: WarmStart) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of (input_ids, labels), both [batch, up to 15]: 8 of prompt, answer, end, padding."""
    import torch

    stream, rng = digits.prompts(recipe.variant, recipe.seed, held_out=False), random.Random(0)
    while True:
        some = list(islice(stream, recipe.batch_size))
        answers = [_label(prompt, recipe.obedience, rng) for prompt in some]
        texts = [prompt + answer for prompt, answer in zip(some, answers, strict=True)]
        ids = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
        longest = max(map(len, ids))
        input_ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in ids])
        labels = input_ids.clone()
        labels[:, : len(some[0])] = IGNORED
        labels[input_ids == tokenizer.pad_token_id] = IGNORED
        yield input_ids, labels


def _label(prompt: str, obedience: float, rng: random.Random) -> str:
    answer = digits.solve(prompt)
    return answer if rng.random() < obedience else answer[::-1]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums are ordered by thread, so one thread makes the weights equal on every core count."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
