"""What every rollout is drawn from: the place in the stream of prompts, the rounds, the tokens spent.

    take what was drawn ahead -> hand the sampler the present weights -> rounds of prompts, until there are
    enough -> begin the next rollout's batch, where the recipe draws one step ahead (`ahead.py`)

The place only grows, and so do the tokens: a restore of old weights takes back neither.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from autotune.recipe import Recipe
from autotune.trainer.ahead import Ahead, Drawn, Order, Wish
from autotune.trainer.clock import PhaseClock
from autotune.trainer.collect import (
    Collected,
    Room,
    Samples,
    Scores,
    collect,
    gathered,
    rows_to_draw,
    sample_all,
    score_all,
)
from autotune.trainer.live import LiveKnobs
from autotune.trainer.parts import Parts
from autotune.trainer.rollout.base import Draw, pad_prompts
from autotune.trainer.rollout.vllm import VllmSampler

Note = Callable[[str, str], None]


class Drawing:
    """The samples of one rollout after the other.

    Args:
        recipe: of the run.
        parts: sampler, prompts, rewards and ranks.
        live: the knobs, which stay during a rollout.
        note: tells something that is no number: note(about, text).
    """

    def __init__(self, recipe: Recipe, parts: Parts, live: LiveKnobs, note: Note) -> None:
        self.parts = parts
        self._recipe, self._live, self._note = recipe, live, note
        self.cursor = 0
        """Prompts drawn so far."""
        self.tokens = 0
        """Sampled so far, prompts' and responses'."""
        self.room = Room(on_shrink=lambda text: note("rollout/memory", text))
        self.dropped = 0
        """Prompts of the rollout in progress that were passed over because they are too long."""
        self.age = 0.0
        """Rollouts between the weights that drew this rollout's samples and its updates."""
        self._drawn = 0  # prompts of the rollout in progress
        self.drawn_tokens = 0
        """Sampled for the rollout in progress."""
        self._ahead: Ahead | None = None
        if recipe.rollout.one_step_off and isinstance(parts.sampler, VllmSampler):
            self._ahead = Ahead(parts.sampler)
        self._foreign = False  # weights of a checkpoint are in force: no batch ahead was drawn with them

    # -- one rollout -------------------------------------------------------------------------------

    def rollout(self, rollout: int, clock: PhaseClock) -> Collected:
        """A rollout's data, from the model's present weights or, one step off, from those before them."""
        ahead = self._taken(rollout, clock)
        sampler = self.parts.sampler
        with ExitStack() as ready:
            if sampler.has_own_weights:
                with clock.phase("weight_sync"):
                    ready.enter_context(sampler.ready())
            with clock.phase("rollout"):
                data = self.collect(rollout, ahead)
        self.age = float(ahead is not None and ahead.whole)  # of this rank's; rank 0 decides
        self._begin_next(rollout + 1)
        return data

    def finish(self) -> None:
        """The rollout has happened, whatever became of it."""
        self.cursor += self._drawn + self.dropped
        self.tokens += self.drawn_tokens

    def collect(self, rollout: int, ahead: Drawn | None = None) -> Collected:
        """Draw and score rounds of prompts until the rollout has enough."""
        group, rounds = self._live.count("rollout_n"), self._recipe.trainer.dynamic_sampling
        self.dropped = 0

        def draw_round(before: int, count: int) -> tuple[Samples, Scores]:
            if ahead is not None and before == 0:
                return self._scored(ahead.order, self._gathered(ahead))
            return self.round(rollout, before, self._at_least(count))

        data = collect(draw_round, self._live.count("train_batch_size"), rounds)
        self._drawn = len(data.scores.silent)
        drawn = data.drawn
        self.drawn_tokens = int(drawn.lengths.sum() + drawn.prompt_lengths.sum() * group)
        return data

    def round(self, rollout: int, before: int, count: int) -> tuple[Samples, Scores]:
        """Draw and score the next `count` prompts' groups, `before` prompts into the rollout."""
        order = self._order(self._wish(rollout, self.cursor + before + self.dropped, before, count))
        return self._scored(order, self._sampled(order))

    def _at_least(self, prompts: int) -> int:
        """Every rank needs something to sample."""
        return max(prompts, -(-self.parts.ranks.size // self._live.count("rollout_n")))

    def _wish(self, rollout: int, place: int, before: int, count: int) -> Wish:
        """Ask for the groups of the next `count` prompts from a place, `before` prompts into the rollout."""
        live = self._live
        draw = Draw(
            seed=self._recipe.seed,
            rollout=rollout,
            temperature=live["temperature"],
            max_response_length=live.count("max_response_length"),
            first_prompt=before,
        )
        return Wish(place, count, live.count("max_prompt_length"), live.count("rollout_n"), draw)

    def _order(self, wish: Wish) -> Order:
        """Read the prompts that are asked for, and lay them out."""
        taken = self.parts.prompts.take(wish.place, wish.count, wish.limit)
        return Order(wish, taken, pad_prompts(taken.encoded, wish.limit, self.parts.pad_id))

    def _whole_batch(self) -> int:
        """Prompts of a rollout's first round."""
        return self._at_least(self._live.count("train_batch_size"))

    def _sampled(self, order: Order) -> Samples:
        chunk = self._live.count("rollout_micro_batch_size")
        parts, wish = self.parts, order.wish
        return sample_all(parts.sampler, order.prompts, wish.draw, wish.group, chunk, parts.ranks, self.room)

    def _scored(self, order: Order, samples: Samples) -> tuple[Samples, Scores]:
        parts = self.parts
        self.dropped += order.taken.dropped
        group = order.wish.group
        scores = score_all(samples, order.taken.examples, parts.rewards, parts.tokenizer, group, parts.ranks)
        return samples, scores

    # -- one step ahead ----------------------------------------------------------------------------

    def _begin_next(self, rollout: int) -> None:
        """Begin drawing the next rollout, unless this one is the last."""
        if self._ahead is None or self.over(rollout, self.tokens + self.drawn_tokens):
            return
        place = self.cursor + self._drawn + self.dropped
        order = self._order(self._wish(rollout, place, 0, self._whole_batch()))
        rows = rows_to_draw(order.prompts, order.wish.group, self.parts.ranks)
        chunk = self._live.count("rollout_micro_batch_size")
        self._foreign = False
        self._ahead.begin(order, rows, self.room.at_once(chunk))

    def _taken(self, rollout: int, clock: PhaseClock) -> Drawn | None:
        """What was drawn ahead, if it is what would be asked for now; what is not is spent."""
        if self._ahead is None:
            return None
        with clock.phase("rollout"):
            drawn = self._ahead.take(self.room)
        if drawn is None:
            return None
        reason = "weights of a checkpoint were brought back" if self._foreign else ""
        if drawn.order.wish != self._wish(rollout, self.cursor, 0, self._whole_batch()):
            reason = reason or "a knob of sampling has changed"
        self.tokens += self._of_all_ranks(drawn.tokens if reason or not drawn.whole else 0)
        if not reason:
            return drawn
        self._note("rollout/ahead", f"{reason}: what was drawn ahead is thrown away and drawn anew")
        return None

    def _of_all_ranks(self, number: int) -> int:
        """The sum; a collective call."""
        ranks, device = self.parts.ranks, self.parts.engine.device
        return number if ranks.size == 1 else int(ranks.sum(torch.tensor(number, device=device)))

    def _gathered(self, ahead: Drawn) -> Samples:
        """Every rank's share of what was drawn ahead; a rank that had no memory for its own draws it now."""
        parts, order = self.parts, ahead.order
        if not ahead.whole:
            return self._sampled(order)
        assert isinstance(parts.sampler, VllmSampler)
        width = order.wish.draw.max_response_length
        responses = [parts.sampler.responses(part, width) for part in ahead.parts]
        return gathered(responses, order.prompts, order.wish.group, parts.ranks)

    def brought_back(self) -> None:
        """A checkpoint's weights are in force now: what is being drawn ahead is not theirs."""
        self._foreign = True

    def wait(self) -> None:
        """Until the sampler is free for others."""
        if self._ahead is not None:
            self._ahead.wait()

    def close(self) -> None:
        """After the sampler."""
        if self._ahead is not None:
            self._ahead.close()

    # -- the end, and keeping ----------------------------------------------------------------------

    def over(self, rollout: int, tokens: int) -> bool:
        """Whether a run is at its end with these rollouts and tokens behind it."""
        trainer = self._recipe.trainer
        spent = trainer.token_budget is not None and tokens >= trainer.token_budget
        return spent or rollout >= trainer.rollouts

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor, "tokens": self.tokens, "room": self.room.limit}

    def load_state_dict(self, state: dict[str, Any], room: bool = True) -> None:
        """Go on from a checkpoint; `room` too where it is the same run's."""
        self.cursor, self.tokens = int(state["cursor"]), int(state.get("tokens", 0))
        if room:
            self.room.limit = state.get("room")
