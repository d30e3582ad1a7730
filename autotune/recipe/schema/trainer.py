"""`trainer`: everything that an update obeys."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from autotune.recipe.schema.base import Count, NonNegative, Positive, Section


class KlSection(Section):
    """How the KL to the reference is estimated, and where it acts: in one place, never in both."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """In the reward the default is k1, the only one whose score-function gradient is the KL's."""
    placement: Literal["loss", "reward"] = "loss"
    """`reward` takes `kl_coef` x KL of the sampling weights off the reward: per token with a critic,
    summed over the response without. The logged `reward_mean` stays the task's."""

    @model_validator(mode="before")
    @classmethod
    def _estimator_of_the_reward(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("placement") == "reward":
            return {"estimator": "k1", **data}
        return data


class CriticSection(Section):
    """The value model of `algorithm: ppo`; its learning rate is `critic_learning_rate`."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    """0 trusts the critic's next value alone, 1 the whole return."""
    value_clip: Positive | None = 0.2
    """A value may move this far from its old one, in reward units, before its loss stops falling;
    null does not clip."""
    whiten: bool = True
    """Advantages of a rollout get mean 0 and standard deviation 1 over its response tokens."""


class LrScheduleSection(Section):
    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Annotated[int, Field(ge=0)] = 0
    """Rollouts of linear warm-up."""


class PackingSection(Section):
    """Micro batches without padding, and what else makes updates fast without changing them.

    `auto` means: where the trainer runs on a GPU. On a CPU padded batches are kept, bit for bit."""

    enabled: Literal["auto", "on", "off"] = "auto"
    """Lay the sequences of a micro batch one after the other, and keep no logits (`head_tokens`)."""
    tokens: Count | None = None
    """Tokens of a micro batch; then `micro_batch_size`, in samples, is not used for cutting. Never
    changes the result. A sample that is longer makes a micro batch of its own. Old log-probs are then
    computed in batches of their own: the first ratios are 1 up to rounding."""
    head_tokens: Count = 4096
    """Response positions whose logits exist at the same time."""
    compile: bool = False
    """Compile the decoder layers for packed micro batches (torch.compile, ZeRO 0 to 2): fewer kernels,
    half a minute at the start."""
    compile_head: bool = False
    """Compile the passes over a chunk's logits into one: memory traffic that costs a small model much."""
    graphs: bool = False
    """Record packed passes as CUDA graphs and repeat them, on one GPU at ZeRO 0 in bfloat16; elsewhere the
    recipe is refused, or the run notes that nothing is recorded. Of use where a model is so small that the
    host cannot start its kernels fast enough. Each new size of a micro batch, and each knob of the loss
    that moves, is recorded anew."""
    leave_out_quiet: Literal["auto", "on", "off"] = "auto"
    """Groups without signal (advantages 0) get no backward pass. Their tokens still count in the loss's
    average, so the gradient is the same. Not done while the KL or entropy coefficient is above 0, with
    `algorithm: ppo`, with the KL in the reward, or on several ranks. `ratio_*` and `kl_step` per
    update are then over the tokens trained on; `clip_ratio` is over all of them."""


CLIP_RANGES: dict[str, tuple[float, float]] = {
    "grpo": (0.2, 0.2),
    "dr_grpo": (0.2, 0.2),
    "dapo": (0.2, 0.28),  # clip-higher: rare tokens may grow further
    "gspo": (3e-4, 4e-4),  # a mean over a long response hardly moves; short ones want more
    "rloo": (0.2, 0.2),
    "ppo": (0.2, 0.2),
}
"""Algorithm -> low and high clip range where the recipe gives none, as published."""

LOSS_AVERAGES: dict[str, str] = {
    "grpo": "tokens",  # verl's and OpenRLHF's habit; `responses` is the paper's
    "dr_grpo": "length",
    "dapo": "tokens",
    "gspo": "responses",
    "rloo": "tokens",
    "ppo": "tokens",
}
"""Algorithm -> `loss_average` where the recipe gives none."""


class TrainerSection(Section):
    """Everything the trainer obeys. Batch sizes name their unit; see `autotune.knobs`."""

    algorithm: Literal["grpo", "dr_grpo", "dapo", "gspo", "rloo", "ppo"] = "grpo"
    """Who is compared with whom, and what is clipped: `autotune.trainer.algorithms`."""
    rollouts: Count = 60
    """Length of the run: rounds of sampling and updating."""
    token_budget: Count | None = None
    """End after the rollout that brings all sampled tokens, prompts' and responses', to this many; a run
    whose batch size or lengths change is then as long as any other. `rollouts` stays the upper limit."""
    train_batch_size: Count = 64
    """Prompts per rollout."""
    rollout_n: Count = 8
    """Responses per prompt: the group that a response is compared with; 1 is for `ppo` only."""
    ppo_mini_batch_size: Count = 16
    """Prompts per optimizer step."""
    ppo_epochs: Count = 1
    micro_batch_size: Count = 128
    """Samples per backward pass; never changes the result."""
    rollout_micro_batch_size: Count = 512
    """Samples generated at once."""
    packing: PackingSection = PackingSection()
    kl_coef: NonNegative = 0.005
    """Weight of the KL to the reference; 0 builds no reference model."""
    kl: KlSection = KlSection()
    loss_average: Literal["tokens", "responses", "length"] | None = None
    """What weighs the same in a mini-batch: every token, every response, or every token of
    max_response_length x responses; unset, as the algorithm has it (`LOSS_AVERAGES`)."""
    dynamic_sampling: Annotated[int, Field(ge=0, le=64)] = 0
    """Further rounds of sampling at most in which groups without signal (all rewards equal) are
    replaced by new prompts, as in DAPO; 0 is off. Rewards and lengths are logged over all draws."""
    clip_range: Positive | None = None
    """Both sides at once; unset, as the algorithm has it (`CLIP_RANGES`), usually 0.2."""
    clip_range_low: Positive | None = None
    clip_range_high: Positive | None = None
    actor_learning_rate: Positive = 3.0e-4
    critic_learning_rate: Positive | None = None
    """Of `ppo`'s critic; unset, twice the actor's. Both follow `lr_schedule`."""
    critic: CriticSection = CriticSection()
    lr_schedule: LrScheduleSection = LrScheduleSection()
    adam_betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: NonNegative = 0.0
    max_grad_norm: Positive = 1.0
    max_prompt_length: Count = 16
    prompt_cut: Literal["left", "drop", "error"] = "left"
    """Prompts longer than `max_prompt_length` lose their beginning, are passed over, or are refused."""
    max_response_length: Count = 8
    temperature: Positive = 1.0
    entropy_coef: NonNegative = 0.0
    kl_step_responses: Annotated[int, Field(ge=64)] = 64
    """Responses in the fixed subset on which the drift after the last update is measured."""
    veto_snapshot: bool = True
    """Keep last rollout's weights and moments until the controller has answered."""

    def clip_low(self) -> float:
        return self.clip_range_low or self.clip_range or CLIP_RANGES[self.algorithm][0]

    def clip_high(self) -> float:
        return self.clip_range_high or self.clip_range or CLIP_RANGES[self.algorithm][1]

    def average(self) -> str:
        return self.loss_average or LOSS_AVERAGES[self.algorithm]

    def critic_rate(self) -> float:
        return self.critic_learning_rate or 2.0 * self.actor_learning_rate

    @property
    def has_critic(self) -> bool:
        return self.algorithm == "ppo"

    @property
    def loss_kind(self) -> Literal["token", "sequence"]:
        """What a policy ratio belongs to: a token, or a whole response."""
        return "sequence" if self.algorithm == "gspo" else "token"
