"""The training loop: rollout after rollout, each one sampled, learnt from, measured and recorded.

    sample and score -> old log-probs -> reference log-probs -> U updates -> drift -> record
    on_rollout(record)      somebody outside may now set knobs or bring weights back
    checkpoint if due

The loop knows no controller. It reads its knobs from `live` at the top of a rollout and hands out
a record at its end; between the two nothing changes but weights. Its clock is the rollout index,
which never rewinds: a restore brings back weights, moments and Adam's step count, while the data
cursor and the noise go on, or else the same collapse would happen again.

What must survive a kill is small: weights and moments, the rollout index, the data cursor, the
knobs, and what `extra_state` gives. There are no random streams to save: prompts, mini-batch order,
sampling noise and dropout are functions of seed and place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.decisions import RunFacts
from autotune.errors import AdapterError, CheckpointError, ControlStop
from autotune.recipe import Recipe, knob_vector, recipe_facts
from autotune.trainer.checkpoint import (
    checkpoint_rollout,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from autotune.trainer.clock import PhaseClock
from autotune.trainer.collect import Collected, describe
from autotune.trainer.drawing import Drawing
from autotune.trainer.engine import Engine
from autotune.trainer.evaluate import evaluate
from autotune.trainer.graphs import Graphs, hindrance
from autotune.trainer.interrupts import TogetherInterrupts, held_interrupts
from autotune.trainer.live import LiveKnobs
from autotune.trainer.meters import Measured, Meters
from autotune.trainer.order import Stream, torch_seed
from autotune.trainer.packing import packs
from autotune.trainer.parts import build_parts
from autotune.trainer.records import RolloutRecord
from autotune.trainer.schedule import factor
from autotune.trainer.scoring import Scoring, loss_knobs
from autotune.trainer.update import (
    Experience,
    MiniBatch,
    Updater,
    seeded_dropout,
    with_signal,
)

OnPhase = Callable[[str, int], None]
OnEvent = Callable[[str, dict[str, Any]], None]


class Trainer:
    """One run of a recipe in a folder."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path,
        *,
        resume: bool = False,
        on_phase: OnPhase | None = None,
        on_event: OnEvent | None = None,
        extra_state: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Build everything; with `resume`, continue from the folder's newest good checkpoint.

        Args:
            recipe: the run.
            folder: its run folder; checkpoints go into `checkpoints` below it.
            resume: continue instead of starting.
            on_phase: told (phase, rollout) as phases are reached: rollout, update (after the first
                update), on_rollout, save, save:files, save:renamed, between.
            on_event: told ("eval", ...), ("checkpoint", ...) and ("note", ...) as they happen.
            extra_state: JSON state of others to be saved with every checkpoint.
        """
        self.recipe = recipe
        self.folder = Path(folder)
        self.rollout = 0
        self.restored_state: dict[str, Any] | None = None
        self._resumed = resume
        self._on_phase = on_phase or (lambda phase, rollout: None)
        self._on_event = on_event or (lambda name, payload: None)
        self._extra_state = extra_state or dict
        self.parts = build_parts(recipe, self.folder)
        self._packed = packs(recipe.trainer.packing, self.parts.model, self.parts.engine.device)
        self._graphs = self._recorded_passes()
        self._interrupts = TogetherInterrupts(self.parts.ranks.size)
        self._before: list[object] = []  # snapshots of every engine from before this rollout's updates
        self._half_done = False  # this rollout's updates have begun, its record is not out
        self._saved = -1  # rollout of the newest checkpoint written by this process
        self.live = LiveKnobs(
            knob_vector(recipe, self.parts.ranks.size),
            world_size=self.parts.ranks.size,
            context=self._context(),
            has_reference=self.parts.reference is not None,
            use_learning_rate=lambda peak: self._use_learning_rate(self.parts.engine, peak),
            use_critic_learning_rate=self._use_critic_learning_rate,
            smallest_group=1 if recipe.trainer.has_critic else 2,
            shortest_prompts=(self.parts.prompts.shortest_limit, self.parts.prompts.why_not_shorter),
            highest_temperature=recipe.rollout.highest_temperature(),
        )
        self.drawing = Drawing(recipe, self.parts, self.live, self._note)
        if resume:
            self._resume()
        elif recipe.checkpoint.start is not None:
            self._begin_from(Path(recipe.checkpoint.start))

    # -- what the outside asks for -----------------------------------------------------------------

    def facts(self) -> RunFacts:
        """Structure of the run, and which knobs and metrics it has, with reasons."""
        return recipe_facts(self.recipe, self.parts.ranks.size)

    def replace_parts(self, **parts: Any) -> None:
        """Put others in the place of `Parts`' fields, before the first rollout."""
        self.parts = self.drawing.parts = replace(self.parts, **parts)

    def run(self, on_rollout: Callable[[RolloutRecord], None]) -> None:
        """Train to the end; a stop or Ctrl-C is saved and raised again.

        Args:
            on_rollout: called after every rollout; may set `live` and bring weights back.
        """
        with self._interrupts.held():
            self._run(on_rollout)

    def _run(self, on_rollout: Callable[[RolloutRecord], None]) -> None:
        try:
            if not self._resumed:
                self._save()
            for text in self.parts.task.notes if self.rollout == 0 else ():
                self._note("task", text)
            if self.recipe.trainer.packing.graphs and self._graphs is None:
                self._note("packing/graphs", f"nothing is recorded: {self._unrecorded()}")
            while not self._over():
                self._one_rollout(on_rollout)
                self._on_phase("between", self.rollout)
                self._interrupts.obey()
            self._evaluate_now()
        except (ControlStop, KeyboardInterrupt):
            if self._interrupts.in_step:
                self._save_stopped()
            raise

    def _over(self) -> bool:
        return self.drawing.over(self.rollout, self.drawing.tokens)

    def undo_rollout(self) -> None:
        """Bring back weights, moments and step count from before this rollout's updates.

        Raises:
            AdapterError: the recipe keeps no such snapshot, or no rollout has been trained yet.
        """
        if not self._before:
            raise AdapterError(
                "there is no snapshot from before this rollout's updates: expected"
                " trainer.veto_snapshot: true and a finished rollout; restore a checkpoint instead"
            )
        for engine, before in zip(self._engines, self._before, strict=True):
            engine.restore(before)

    def restore_checkpoint(self, before_rollout: int) -> int:
        """Bring back weights, moments and step count of the newest fitting checkpoint.

        Returns:
            The checkpoint's rollout, at most `before_rollout`.

        Raises:
            CheckpointError: no whole checkpoint is that old.
        """
        path = newest_checkpoint(self._checkpoints, before_rollout)
        if path is None:
            raise CheckpointError(
                f"no whole checkpoint of rollout {before_rollout} or before in {self._checkpoints}"
            )
        self._load(path)
        self.drawing.brought_back()
        return checkpoint_rollout(path)

    def evaluate(self) -> dict[str, Any]:
        """Score on the fixed held-out prompts; empty when the task holds nothing out."""
        parts = self.parts
        if parts.held_out is None:
            return {}
        self.drawing.wait()  # for the sampler: the weights are replaced
        with parts.engine.whole_weights(), parts.sampler.ready():
            return evaluate(
                self.recipe,
                parts.held_out,
                parts.sampler,
                parts.rewards,
                parts.tokenizer,
                parts.ranks,
                self.drawing.room,
            )

    def close(self) -> None:
        """Give the engines' memory back."""
        self.parts.rewards.close()
        self.parts.sampler.close()
        self.drawing.close()
        for engine in self._engines:
            engine.close()

    @property
    def _engines(self) -> list[Engine]:
        """The actor's, and the critic's where there is one."""
        critic = self.parts.critic
        return [self.parts.engine] if critic is None else [self.parts.engine, critic.engine]

    # -- one rollout -------------------------------------------------------------------------------

    def _one_rollout(self, on_rollout: Callable[[RolloutRecord], None]) -> None:
        scores = self._evaluate_if_due()
        record = self._train(scores)
        self._on_phase("on_rollout", self.rollout)
        with held_interrupts():
            self._half_done = False
            try:
                on_rollout(record)
            finally:  # whatever it raised, this rollout has happened
                self.rollout += 1
                self.drawing.finish()
        if self._checkpoint_due():
            self._save()

    def _train(self, evaluation: dict[str, Any]) -> RolloutRecord:
        """Sample, learn and measure; the record tells all of it."""
        clock, knobs, epoch = PhaseClock(self.parts.engine.device), self.live.vector(), self.live.epoch
        with clock.phase("total"):
            self._on_phase("rollout", self.rollout)
            with self._whole_weights():
                data = self.drawing.rollout(self.rollout, clock)
                self._tell_news()
                self._interrupts.obey()
                scoring = self._scoring(data)
                plan = scoring.plan()
                meters = self._meters(len(plan))
                experience = scoring.experience(plan, meters, clock)
            plan = with_signal(plan, experience.advantages)
            with clock.phase("update"):
                moved = self._update(plan, experience, meters)
            with clock.phase("kl_step_forward"), self.parts.engine.whole_weights():
                scoring.drift(experience, meters)
                meters.send(self.parts.ranks)
            measured = meters.finish(self.parts.ranks)
        return RolloutRecord(
            rollout=self.rollout,
            knobs=knobs,
            epoch=epoch,
            scalars=self._scalars(data, measured, moved, clock, evaluation),
            per_update=measured.per_update,
            histograms=measured.histograms,
            times=dict(clock.seconds),
        )

    def _context(self) -> int | None:
        """Longest sequence in tokens, of the model and of the engine that samples."""
        limits = [getattr(self.parts.model.config, "max_position_embeddings", None)]
        if self.parts.sampler.has_own_weights:
            limits.append(self.recipe.rollout.max_model_len)
        return min((limit for limit in limits if limit is not None), default=None)

    @contextmanager
    def _whole_weights(self) -> Iterator[None]:
        with ExitStack() as whole:
            for engine in self._engines:
                whole.enter_context(engine.whole_weights())
            yield

    def _recorded_passes(self) -> Graphs | None:
        """CUDA graphs, where the recipe wants them and this run can: packed, on a GPU, alone at ZeRO 0."""
        optimizer = self.parts.engine.flat_optimizer
        if not self.recipe.trainer.packing.graphs or self._unrecorded() or optimizer is None:
            return None
        return Graphs(optimizer)

    def _unrecorded(self) -> str:
        """Why there are no CUDA graphs although the recipe may ask for them."""
        engine = self.parts.engine
        return hindrance(engine.flat_optimizer, self._packed, engine.device)

    def _scoring(self, data: Collected) -> Scoring:
        """What is computed from this rollout's samples, under its knobs."""
        return Scoring(
            self.recipe, self.parts, self.live, data, self.rollout, self._packed, self._graphs, self._note
        )

    def _meters(self, updates: int) -> Meters:
        return Meters(
            updates,
            self.live["clip_range_low"],
            self.live["clip_range_high"],
            self.parts.reference is not None,
            self.parts.engine.device,
            ratio=self.recipe.trainer.loss_kind,
            has_critic=self.parts.critic is not None,
        )

    def _update(self, plan: list[MiniBatch], experience: Experience, meters: Meters) -> list[bool]:
        """All updates of this rollout; says which of them moved the weights."""
        engine, critic, recipe = self.parts.engine, self.parts.critic, self.recipe
        engine.set_learning_rate(self.live["actor_learning_rate"] * self._factor(self.rollout))
        if critic is not None:
            critic.engine.set_learning_rate(self.live["critic_learning_rate"] * self._factor(self.rollout))
        self._before = [e.snapshot() for e in self._engines] if recipe.trainer.veto_snapshot else []
        updater = Updater(
            engine,
            experience,
            loss_knobs(recipe, self.live),
            self.live["temperature"],
            critic,
            self._graphs,
        )
        moved = []
        self._half_done = True
        with seeded_dropout(torch_seed(Stream.DROPOUT, recipe.seed, self.rollout, engine.rank)):
            for stepped in updater.run(plan, meters):
                moved.append(stepped)
                if len(moved) == 1:
                    self._on_phase("update", self.rollout)
                self._interrupts.obey()
        return moved

    def _scalars(
        self,
        data: Collected,
        measured: Measured,
        moved: list[bool],
        clock: PhaseClock,
        evaluation: dict[str, Any],
    ) -> dict[str, float | None]:
        scalars = describe(data.drawn, data.scores) | measured.scalars
        scalars["learning_rate"] = self.parts.engine.learning_rate()
        scalars["updates_skipped"] = float(moved.count(False))
        scalars["prompts_dropped"] = float(self.drawing.dropped)
        scalars["tokens_per_second"] = self.drawing.drawn_tokens / clock.seconds["total"]
        if self.recipe.rollout.one_step_off:
            scalars["data_age"] = self.drawing.age
        if evaluation:
            scalars["eval_score"] = evaluation.get("greedy", evaluation["sampled"])
        return scalars

    def _tell_news(self) -> None:
        if self._graphs is not None and (text := self._graphs.news()):
            self._note("packing/graphs", text)
        for news in self.parts.rewards.news():
            self._note(f"reward/{news.component}", news.text)

    def _note(self, about: str, text: str) -> None:
        """Something for the run's record that is no number, such as why a response had no score."""
        self._on_event("note", {"rollout": self.rollout, "about": about, "text": text})

    # -- learning rate -----------------------------------------------------------------------------

    def _factor(self, rollout: int) -> float:
        trainer = self.recipe.trainer
        return factor(trainer.lr_schedule, rollout, trainer.rollouts)

    def _use_learning_rate(self, engine: Engine, peak: float) -> float:
        """Put the coming rollout's rate into an optimizer; the peak that it amounts to there."""
        scale = self._factor(self.rollout)
        engine.set_learning_rate(peak * scale)
        return engine.learning_rate() / scale

    def _use_critic_learning_rate(self, peak: float) -> float:
        critic = self.parts.critic
        assert critic is not None, "critic_learning_rate is no knob without a critic"
        return self._use_learning_rate(critic.engine, peak)

    # -- evaluation and checkpoints ----------------------------------------------------------------

    def _evaluate_if_due(self) -> dict[str, Any]:
        every = self.recipe.eval.every
        due = self.rollout == 0 or (every > 0 and self.rollout % every == 0)
        return self._evaluate_now() if due else {}

    def _evaluate_now(self) -> dict[str, Any]:
        scores = self.evaluate()
        self._tell_news()
        if scores:
            self._on_event("eval", {"rollout": self.rollout, **scores})
        return scores

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _checkpoint_due(self) -> bool:
        return self._over() or self.rollout % self.recipe.checkpoint.every == 0

    def _save(self) -> None:
        """Write a checkpoint of the state between two rollouts; Ctrl-C waits until it is whole."""
        with held_interrupts():
            self._on_phase("save", self.rollout)
            path = save_checkpoint(
                self._checkpoints,
                self.rollout,
                engine=self.parts.engine,
                model=self.parts.model,
                critic=self.parts.critic,
                tokenizer=self.parts.tokenizer,
                state=self._state(),
                keep=self.recipe.checkpoint.keep,
                on_phase=lambda phase: self._on_phase(phase, self.rollout),
            )
            self._saved = self.rollout
            self._on_event("checkpoint", {"rollout": self.rollout, "path": str(path)})

    def _save_stopped(self) -> None:
        """Save the newest state between two rollouts, if it can still be had."""
        if self._half_done and not self._before:
            return  # nothing to go back to: the last checkpoint stands
        if self._half_done:
            self.undo_rollout()
            self._half_done = False
        if self._saved != self.rollout:
            self._save()

    def _state(self) -> dict[str, Any]:
        return {
            "rollout": self.rollout,
            **self.drawing.state_dict(),
            "live": self.live.state_dict(),
            "rewards": self.parts.rewards.state_dict(),
            "extra": self._extra_state(),
        }

    def _resume(self) -> None:
        found = newest_checkpoint(self._checkpoints)
        if found is None:
            raise CheckpointError(
                f"nothing to resume: no whole checkpoint in {self._checkpoints};"
                " start the run without --resume"
            )
        state = self._load(found)
        self.rollout = int(state["rollout"])
        self.drawing.load_state_dict(state)
        self.live.load_state_dict(state["live"])
        self.parts.rewards.load_state_dict(state["rewards"])
        self.restored_state = state["extra"]
        self._saved = self.rollout

    def _begin_from(self, path: Path) -> None:
        """Go on where another run's checkpoint was, under the knobs of this recipe."""
        state = self._load(path)
        self.rollout = int(state["rollout"])
        self.drawing.load_state_dict(state, room=False)

    def _load(self, path: Path) -> dict[str, Any]:
        critic = self.parts.critic
        return load_checkpoint(path, self.parts.engine, critic.engine if critic else None)
