"""TRL's batch arithmetic in our words; plain integers, nothing of TRL.

    micro-step   one forward and backward pass over `micro` completions on each rank
    generation   every steps_per_generation x num_iterations micro-steps
    update       every gradient_accumulation_steps micro-steps
    rollout      the shortest stretch that is whole in both: one generation with all of its updates, or one
                 update with all of its generations

    train_batch_size (prompts)     = micro x ranks x steps_per_generation x generations / num_generations
    ppo_mini_batch_size (prompts)  = micro x ranks x gradient_accumulation_steps / num_generations
    ppo_epochs                     = num_iterations

Not every setting of TRL fits these words: an update may take half a prompt's completions, or go over the
data twice. Such a run is described by its number of updates alone (mini-batch = all prompts, epochs =
updates) and its batch knobs stay (`odd` says why). Where updates straddle generations there is no rollout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Batches:
    """The numbers that TRL reads, and what follows from them."""

    micro: int
    """Completions of one backward pass on one rank: per_device_train_batch_size."""
    ranks: int
    steps_per_generation: int
    group: int
    """num_generations: completions of one prompt."""
    iterations: int
    accumulation: int

    @property
    def every(self) -> int:
        """Micro-steps between generations."""
        return self.steps_per_generation * self.iterations

    @property
    def generations(self) -> int:
        """Of one rollout."""
        return max(self.accumulation // self.every, 1)

    @property
    def steps(self) -> int:
        """Micro-steps of one rollout; 0 where updates straddle generations."""
        longer, shorter = max(self.every, self.accumulation), min(self.every, self.accumulation)
        return longer if longer % shorter == 0 else 0

    @property
    def problem(self) -> str:
        """Why there are no rollouts to speak of, or an empty string."""
        if self.steps:
            return ""
        return (
            f"gradient_accumulation_steps {self.accumulation} and steps_per_generation x num_iterations ="
            f" {self.steps_per_generation} x {self.iterations} do not divide each other: updates straddle"
            " generations"
        )

    @property
    def updates(self) -> int:
        return max(self.steps // self.accumulation, 1)

    @property
    def prompts(self) -> int:
        completions = self.micro * self.ranks * self.steps_per_generation * self.generations
        return completions // self.group

    @property
    def odd(self) -> str:
        """Why mini-batch and epochs cannot be told apart or moved, or an empty string."""
        per_update = self.micro * self.ranks * self.accumulation
        if self.generations > 1 or self.accumulation > self.steps_per_generation:
            return "one update goes over several generations, or over one of them more than once"
        if self.steps_per_generation % self.accumulation:
            return "an update's micro-steps do not divide a generation's"
        if per_update % self.group:
            return f"an update takes {per_update} completions, which are no whole groups of {self.group}"
        return ""

    def knobs(self) -> dict[str, int]:
        """The batch part of the knob vector."""
        mini = self.prompts if self.odd else self.micro * self.ranks * self.accumulation // self.group
        share = self.micro * self.steps_per_generation  # of one rank and generation
        return {
            "train_batch_size": self.prompts,
            "rollout_n": self.group,
            "ppo_mini_batch_size": mini,
            "ppo_epochs": self.updates if self.odd else self.iterations,
            "micro_batch_size": self.micro,
            "rollout_micro_batch_size": share,
            "num_rollout_batches": self.generations,
        }

    def accumulation_for(self, mini_batch: float) -> int:
        """gradient_accumulation_steps that make updates of this many prompts; 0 where none do."""
        samples, step = int(mini_batch) * self.group, self.micro * self.ranks
        steps = samples // step
        fits = mini_batch == int(mini_batch) and samples % step == 0 and steps > 0
        return steps if fits and self.steps_per_generation % steps == 0 else 0

    def with_(self, *, iterations: int | None = None, accumulation: int | None = None) -> Batches:
        """The same run with other numbers."""
        return replace(
            self,
            iterations=self.iterations if iterations is None else iterations,
            accumulation=self.accumulation if accumulation is None else accumulation,
        )
