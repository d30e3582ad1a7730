"""One random model for every test that needs a folder like a user's own."""

from __future__ import annotations

from pathlib import Path


def tiny_folder(folder: Path, hidden: int = 16, layers: int = 1, context: int = 32) -> Path:
    """A Qwen2 of 2000 parameters or a few more, and its character tokenizer; the random state stays.

    Args:
        folder: where both are saved.
        hidden: width, of two heads; the feed-forward layer is half as wide again.
        layers: of the model.
        context: longest sequence in tokens.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from autotune.trainer.builtin import character_tokenizer

    tokenizer = character_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=hidden * 3 // 2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
