"""One rollout's data: prompts drawn, responses sampled and scored.

With dynamic sampling, groups without signal are replaced by new prompts for some further rounds; what
is learnt from are the groups with signal, filled up with the others if there are still too few. What
is *said* about the rollout is said about everything that was drawn: a reward averaged over the kept
groups alone would rise to the middle of its range by selection.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from autotune.errors import TrainingError
from autotune.trainer.advantages import zero_std_groups
from autotune.trainer.forward import TokenBatch
from autotune.trainer.ranks import Ranks, Rows
from autotune.trainer.rewards import Rewards
from autotune.trainer.rollout.base import Draw, Prompts, Responses, Sampler
from autotune.trainer.tasks import Example

Column = NDArray[np.float64]
"""One number per sample, NaN where it could not be scored, [N]."""


@dataclass(frozen=True, slots=True)
class Samples:
    """All responses of a rollout on every rank, in the order prompt by prompt, N = P n."""

    batch: TokenBatch
    sampler_log_probs: Tensor | None
    """float32 [N, R] on the device; None when the sampler gave none."""
    lengths: Rows
    """Response tokens, [N]."""
    truncated: NDArray[np.bool_]
    """Without an end token, [N]."""
    prompt_lengths: Rows
    """[P]."""
    prompts_cut: int


@dataclass(frozen=True, slots=True)
class Scores:
    """What the responses were worth."""

    total: Column
    components: dict[str, Column]
    silent: NDArray[np.bool_]
    """Groups whose scored rewards are all equal: no signal, [P]."""


@dataclass(frozen=True, slots=True)
class Collected:
    """A rollout's data: what is learnt from, and everything that was drawn for it."""

    kept: Samples
    rewards: Tensor
    """Of the kept samples, NaN where one could not be scored, float64 [N] on the CPU."""
    drawn: Samples
    scores: Scores
    """Of everything drawn."""


def collect(draw_round: Callable[[int, int], tuple[Samples, Scores]], wanted: int, rounds: int) -> Collected:
    """Draw `wanted` prompts' groups, and replace silent ones for up to `rounds` further rounds.

    Args:
        draw_round: (prompts drawn so far, prompts to draw) -> their samples and scores.
        wanted: prompts of the rollout.
        rounds: further rounds at most; 0 keeps whatever comes.
    """
    samples, scores = draw_round(0, wanted)
    group = len(samples.lengths) // wanted
    for _ in range(rounds):
        missing = wanted - int((~scores.silent).sum())
        if missing <= 0:
            break
        more = draw_round(len(scores.silent), missing)
        samples, scores = _joined_samples(samples, more[0]), _joined_scores(scores, more[1])
    kept = np.argsort(scores.silent, kind="stable")[:wanted]  # with signal first, each in its order
    rows = (np.sort(kept)[:, None] * group + np.arange(group)).ravel()
    whole = len(rows) == len(samples.lengths)
    return Collected(
        kept=samples if whole else _chosen(samples, rows, group),
        rewards=torch.from_numpy(scores.total[rows]),
        drawn=samples,
        scores=scores,
    )


@dataclass(slots=True)
class Room:
    """How many samples fit into memory at once on this rank: halved where they did not, and remembered."""

    limit: int | None = None
    """None until something did not fit."""
    on_shrink: Callable[[str], None] | None = None
    """Told what happened, in words."""

    def at_once(self, wanted: int) -> int:
        return wanted if self.limit is None else min(wanted, self.limit)

    def shrink(self, tried: int, error: Exception) -> None:
        """Half of what was tried, from now on.

        Raises:
            TrainingError: a single sample does not fit.
        """
        if tried <= 1:
            raise TrainingError(
                f"sampling a single response ran out of memory: {error}\nNext: lower max_response_length,"
                " or see docs/engines.md for an engine that needs less"
            ) from error
        self.limit = tried // 2
        if self.on_shrink is not None:
            self.on_shrink(f"{tried} samples at once ran out of memory: from now on {self.limit} at most")


def sample_all(
    sampler: Sampler,
    prompts: Prompts,
    draw: Draw,
    group: int,
    chunk: int,
    ranks: Ranks,
    room: Room | None = None,
) -> Samples:
    """Draw `group` responses per prompt; each rank draws its part in chunks of `chunk` samples.

    Args:
        sampler: the engine.
        prompts: the prompts of the rollout.
        draw: seed, temperature and length.
        group: responses per prompt.
        chunk: samples at once, where they fit.
        ranks: this process among its peers.
        room: what fitted before.
    """
    drawn, parts, done, room = rows_to_draw(prompts, group, ranks), [], 0, room or Room()
    while done < len(drawn):
        rows = drawn[done : done + room.at_once(chunk)]
        part = _fitting(sampler, prompts, rows, group, draw, room)
        if part is not None:
            parts.append(part)
            done += len(rows)
    return gathered(parts, prompts, group, ranks)


def rows_to_draw(prompts: Prompts, group: int, ranks: Ranks) -> Rows:
    """The samples that this rank draws; where it has none, it draws one and drops it."""
    mine = ranks.share(np.arange(prompts.ids.shape[0] * group))
    return mine if len(mine) else np.arange(1)


def _fitting(
    sampler: Sampler, prompts: Prompts, rows: Rows, group: int, draw: Draw, room: Room
) -> Responses | None:
    """Responses for these rows; None where memory was too small for all of them at once."""
    places = torch.from_numpy(rows // group), torch.from_numpy(rows % group)
    try:
        return sampler.sample(prompts, *places, draw)
    except torch.OutOfMemoryError as error:
        room.shrink(len(rows), error)
    if torch.cuda.is_available():  # after the handler: the error's traceback held the tensors
        torch.cuda.empty_cache()
    return None


def gathered(parts: Sequence[Responses], prompts: Prompts, group: int, ranks: Ranks) -> Samples:
    """Every rank's responses, on every rank; a collective call.

    Args:
        parts: this rank's, in the order of `rows_to_draw`.
    """
    total = prompts.ids.shape[0] * group
    mine = ranks.share(np.arange(total))

    def whole(pick: Callable[[Responses], Tensor]) -> Tensor:
        return ranks.whole(mine, torch.cat([pick(part) for part in parts])[: len(mine)], total)

    ids = whole(lambda part: part.ids)  # [N, R]
    lengths = whole(lambda part: part.mask.sum(dim=1))  # [N]
    truncated = whole(lambda part: part.truncated.long())  # [N]
    known = all(part.log_probs is not None for part in parts)
    log_probs = whole(lambda part: part.log_probs) if known else None  # type: ignore[arg-type,return-value]
    columns = torch.arange(ids.shape[1], device=ids.device)  # [R]
    batch = _batch(prompts, group, ids, columns[None, :] < lengths[:, None])
    return Samples(
        batch=batch,
        sampler_log_probs=log_probs,
        lengths=lengths.cpu().numpy(),
        truncated=truncated.cpu().numpy().astype(bool),
        prompt_lengths=prompts.lengths.numpy(),
        prompts_cut=prompts.cut,
    )


def _batch(prompts: Prompts, group: int, ids: Tensor, mask: Tensor) -> TokenBatch:
    padded = not bool(prompts.mask.all())
    prompt_mask = prompts.mask.repeat_interleave(group, dim=0).to(ids.device) if padded else None
    prompt_ids = prompts.ids.repeat_interleave(group, dim=0).to(ids.device)  # [N, L]
    return TokenBatch(prompt_ids, prompt_mask, ids, mask)


def texts(samples: Samples, tokenizer: PreTrainedTokenizerBase, rows: Rows) -> list[str]:
    """Responses as text, without padding and special tokens."""
    ids = samples.batch.response_ids.cpu().numpy()  # [N, R]
    kept = [ids[row, : samples.lengths[row]].tolist() for row in rows]
    backend = _plain_backend(tokenizer)
    if backend is not None:  # the same texts; `batch_decode` looks at the type of every single id first
        decoded: list[str] = backend.decode_batch(kept, skip_special_tokens=True)
        return decoded
    return tokenizer.batch_decode(kept, skip_special_tokens=True)


def _plain_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """The Rust tokenizer, where nothing of Python's comes after it."""
    own = type(tokenizer)._decode.__module__ == "transformers.tokenization_utils_tokenizers"
    return tokenizer.backend_tokenizer if own and not tokenizer.clean_up_tokenization_spaces else None


def score_all(
    samples: Samples,
    examples: Sequence[Example],
    rewards: Rewards,
    tokenizer: PreTrainedTokenizerBase,
    group: int,
    ranks: Ranks,
) -> Scores:
    """Score every response; each rank scores its part, then all share the numbers."""
    total = len(examples) * group
    mine = ranks.share(np.arange(total))
    table = rewards.score(texts(samples, tokenizer, mine), [examples[row // group] for row in mine])
    columns = [table.total, *table.components.values()]
    part = torch.tensor([[math.nan if v is None else v for v in c] for c in columns]).double()
    whole = ranks.whole(mine, part.T.contiguous(), total)  # [N, 1 + components]
    return _scores(whole, list(table.components), group)


def _scores(whole: Tensor, names: list[str], group: int) -> Scores:
    total = whole[:, 0].view(-1, group)  # [P, n]
    columns = whole.numpy().T  # [1 + components, N]
    return Scores(
        total=columns[0],
        components=dict(zip(names, columns[1:], strict=True)),
        silent=zero_std_groups(total, total.isfinite()).numpy(),
    )


def _joined_scores(first: Scores, second: Scores) -> Scores:
    components = {n: np.concatenate([c, second.components[n]]) for n, c in first.components.items()}
    return Scores(
        total=np.concatenate([first.total, second.total]),
        components=components,
        silent=np.concatenate([first.silent, second.silent]),
    )


def _joined_samples(first: Samples, second: Samples) -> Samples:
    known = first.sampler_log_probs is not None and second.sampler_log_probs is not None
    log_probs = (first.sampler_log_probs, second.sampler_log_probs) if known else None
    return Samples(
        batch=_joined_batches(first.batch, second.batch),
        sampler_log_probs=torch.cat(log_probs) if log_probs else None,  # type: ignore[arg-type]
        lengths=np.concatenate([first.lengths, second.lengths]),
        truncated=np.concatenate([first.truncated, second.truncated]),
        prompt_lengths=np.concatenate([first.prompt_lengths, second.prompt_lengths]),
        prompts_cut=first.prompts_cut + second.prompts_cut,
    )


def _joined_batches(*batches: TokenBatch) -> TokenBatch:
    """Rows under each other, prompts padded on the left to the widest."""
    width = max(batch.prompt_ids.shape[1] for batch in batches)
    ids = torch.cat([_left(batch.prompt_ids, width) for batch in batches])  # [N, L]
    masks = torch.cat([_left(_prompt_mask(batch), width) for batch in batches])  # [N, L]
    return TokenBatch(
        ids,
        None if all(b.prompt_mask is None and b.prompt_ids.shape[1] == width for b in batches) else masks,
        torch.cat([batch.response_ids for batch in batches]),
        torch.cat([batch.response_mask for batch in batches]),
    )


def _left(rows: Tensor, width: int) -> Tensor:
    """Fill [B, l] on the left to [B, width] with zeros: an id that is masked, or False."""
    return torch.nn.functional.pad(rows, (width - rows.shape[1], 0))


def _prompt_mask(batch: TokenBatch) -> Tensor:
    mask = batch.prompt_mask
    return torch.ones_like(batch.prompt_ids, dtype=torch.bool) if mask is None else mask


def _chosen(samples: Samples, rows: Rows, group: int) -> Samples:
    """Some groups of the samples."""
    index = torch.from_numpy(rows).to(samples.batch.response_ids.device)
    log_probs = samples.sampler_log_probs
    return replace(
        samples,
        batch=samples.batch.rows(index, samples.batch.response_ids.shape[1]),
        sampler_log_probs=None if log_probs is None else log_probs[index],
        lengths=samples.lengths[rows],
        truncated=samples.truncated[rows],
        prompt_lengths=samples.prompt_lengths[rows[::group] // group],
    )


def describe(samples: Samples, scores: Scores) -> dict[str, float | None]:
    """The rollout's rewards and lengths under their canonical names."""
    length, scored = samples.lengths, scores.total[np.isfinite(scores.total)]
    p50, p95, p995 = (float(q) for q in np.quantile(length, (0.5, 0.95, 0.995)))
    return {
        "reward_mean": float(scored.mean()) if scored.size else None,
        "reward_std": float(scored.std()) if scored.size else None,
        **{f"reward/{name}": _mean(column) for name, column in scores.components.items()},
        "zero_std_fraction": float(scores.silent.mean()),
        "rollout_success_rate": scored.size / scores.total.size,
        "response_length_mean": float(length.mean()),
        "response_length_p50": p50,
        "response_length_p95": p95,
        "response_length_p995": p995,
        "response_length_max": float(length.max()),
        "truncated_fraction": float(samples.truncated.mean()),
        "prompt_length_mean": float(samples.prompt_lengths.mean()),
        "prompt_length_max": float(samples.prompt_lengths.max()),
        "prompts_cut": float(samples.prompts_cut),
    }


def _mean(column: Column) -> float | None:
    known = column[np.isfinite(column)]
    return float(known.mean()) if known.size else None
