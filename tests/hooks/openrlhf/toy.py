"""A run of OpenRLHF on the CPU, as real as it goes without DeepSpeed and vLLM.

Real: `PPOTrainer.fit`, `train_step`, `ppo_train`, `save_logs_and_checkpoints`, the KL controllers,
`RayActorGroup`'s dispatch, and inside each "actor" `ActorPPOTrainer.ppo_train` with its loss, replay
buffer and batches. Made up: Ray's handles (called in this process), a "model" of eight logits, an engine
that accumulates as DeepSpeed does, and answers that are drawn from the model in place of vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import SimpleNamespace as Space
from typing import Any

import torch
from openrlhf.trainer import ppo_trainer
from openrlhf.trainer.ppo_utils.experience import Experience
from openrlhf.trainer.ray.launcher import BaseModelActor, RayActorGroup
from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer
from transformers import get_scheduler

WORDS, PROMPT, ANSWER, RANKS = 8, 2, 4, 2


def arguments(folder: Any, knobs: Mapping[str, float]) -> Any:
    """OpenRLHF's nested arguments, as far as the trainer reads them."""
    n = int(knobs.get("rollout_n", 4))
    return Space(
        train=Space(
            batch_size=int(knobs.get("ppo_mini_batch_size", 4) * n),
            micro_batch_size=2,
            max_epochs=int(knobs.get("ppo_epochs", 1)),
            num_episodes=1,
            dynamic_batch_enable=False,
            async_enable=False,
            colocate_all=False,
            seed=1,
        ),
        rollout=Space(
            batch_size=int(knobs.get("train_batch_size", 8)),
            n_samples_per_prompt=n,
            vllm_generate_batch_size=int(knobs.get("train_batch_size", 8)),
            temperature=1.0,
        ),
        actor=Space(
            eps_clip_low_high=[knobs.get("clip_range_low", 0.2), knobs.get("clip_range_high", 0.2)],
            dual_clip=None,
            loss_agg_mode="token-mean",
            policy_loss_type="ppo",
            aux_loss_coef=0,
            entropy_coef=0.0,
            lr_warmup_ratio=0.0,
            adam=Space(lr=knobs.get("actor_learning_rate", 0.05)),
        ),
        algo=Space(
            kl=Space(
                init_coef=knobs.get("kl_coef", 0.01),
                target=None,
                horizon=100,
                use_loss=True,
                estimator="k3",
                unbiased_gradient=False,
            ),
            advantage=Space(
                estimator="group_norm",
                is_correction_level="off",
                is_correction_mode="mask",
                is_correction_gating="ratio",
                is_correction_threshold=[0.5, 5.0],
            ),
            dynamic_filtering_enable=False,
        ),
        ds=Space(ring_attn_size=1, tensor_parallel_size=1, packing_samples=False, enable_sleep=False),
        critic=Space(freezing_steps=-1),
        vllm=Space(sync_backend="nccl", enable_sleep=False),
        data=Space(max_len=64),
        eval=Space(steps=float("inf"), temperature=1.0, n_samples_per_prompt=1),
        ckpt=Space(path=str(folder), save_steps=float("inf"), load_enable=False, best_metric_key="none"),
        logger=Space(logging_steps=1, wandb=Space(key=None, run_name="toy"), tensorboard_dir=None),
    )


# ---------------------------------------------------------------------------------------- one actor


class Engine:
    """Accumulates as DeepSpeed does: by a count that is never begun anew by itself."""

    def __init__(self, micro: int, accumulate: int, optimizer: Any, scheduler: Any) -> None:
        self.micro, self.accumulate, self.micro_steps = micro, accumulate, 0
        self.optimizer, self.scheduler = optimizer, scheduler
        self.updates: list[int] = []
        """Micro batches behind each update."""
        self._since = 0
        self.norm = 0.0

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.micro

    def set_train_batch_size(self, samples: int) -> None:
        if samples % (self.micro * RANKS):
            raise ValueError("Train batch size must be divisible by micro-batch data parallelism")
        self.accumulate = samples // (self.micro * RANKS)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.accumulate).backward()

    def step(self) -> None:
        self._since += 1
        if (self.micro_steps + 1) % self.accumulate == 0:
            self.updates.append(self._since)
            self._since = 0
            self.norm = self.optimizer.param_groups[0]["params"][0].grad.norm().item()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
        self.micro_steps += 1


class Strategy:
    """What `ActorPPOTrainer` asks of OpenRLHF's `DeepspeedStrategy`."""

    ring_attn_group = None
    ring_attn_size = ds_tensor_parallel_size = 1
    world_size = RANKS

    def __init__(self, args: Any) -> None:
        self.args = args
        self.micro_train_batch_size = args.train.micro_batch_size
        self.accumulated_gradient = args.train.batch_size // args.train.micro_batch_size // RANKS

    def is_rank_0(self) -> bool:
        return False

    def all_reduce(self, status: Any) -> Any:
        return status

    def backward(self, loss: torch.Tensor, model: Any, optimizer: Any) -> None:
        model.model.backward(loss)

    def optimizer_step(self, optimizer: Any, model: Any, scheduler: Any, name: str) -> None:
        model.model.step()

    def get_grad_norm(self, model: Any) -> float:
        return model.model.norm


class Model:
    """In the place of OpenRLHF's `Actor`: divides its logits by the temperature that it holds."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.logits = torch.nn.Parameter(torch.zeros(WORDS))

    def train(self) -> None:
        """No dropout."""

    def __call__(self, sequences: torch.Tensor, mask: torch.Tensor, **options: Any) -> Any:
        new = torch.log_softmax(self.logits / self.temperature, 0)
        entropy = (-(new.exp() * new).sum()).expand(sequences.shape)
        return new[sequences[:, 1:]], Space(entropy=entropy)


class Policy:
    """What a `PolicyModelActor` holds after its initialisation."""

    execute_batch = BaseModelActor.execute_batch

    def __init__(self, args: Any, total: int) -> None:
        self.strategy = Strategy(args)
        self.model = Model(args.rollout.temperature)
        optimizer = torch.optim.SGD([self.model.logits], lr=args.actor.adam.lr)
        scheduler = get_scheduler(
            "constant_with_warmup", optimizer, num_warmup_steps=0, num_training_steps=total
        )
        self.model.model = Engine(2, self.strategy.accumulated_gradient, optimizer, scheduler)
        self.trainer = ActorPPOTrainer(
            self.strategy,
            self.model,
            ema_model=None,
            actor_optim=optimizer,
            actor_scheduler=scheduler,
            micro_train_batch_size=args.train.micro_batch_size,
            dataloader_pin_memory=False,
        )

    def append(self, experience: Experience) -> None:
        self.trainer.replay_buffer.append(experience)

    @torch.no_grad()
    def forward(self, sequences: Any, action_mask: Any, attention_mask: Any) -> torch.Tensor:
        return self.model(sequences, action_mask, attention_mask=attention_mask)[0]

    def fit(self, kl_ctl: float = 0) -> Any:
        status = self.trainer.ppo_train(kl_ctl)
        self.trainer.replay_buffer.clear()
        return status

    def save_checkpoint(self, tag: str, client_states: Any = None, **options: Any) -> None:
        self.saved = {"tag": tag, **copy.deepcopy(client_states)}


class Handle:
    """A Ray actor's handle that works at once, in this process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> Any:
        if name == "__ray_call__":
            return Space(remote=lambda fn, *args, **named: Ref(fn(self.actor, *args, **named)))
        return Space(remote=lambda *args, **named: Ref(getattr(self.actor, name)(*args, **named)))


class Ref:
    def __init__(self, value: Any) -> None:
        self.value = value


def get(refs: Any) -> Any:
    """`ray.get` of these references."""
    return [ref.value for ref in refs] if isinstance(refs, list) else refs.value


def group(actors: list[Any]) -> RayActorGroup:
    made = RayActorGroup.__new__(RayActorGroup)
    made._actor_handlers, made.duplicate_actors = [Handle(actor) for actor in actors], 1
    return made


# --------------------------------------------------------------------------------------- the driver


class Generator:
    """Draws answers from the first actor's logits, at the sampler's temperature."""

    def __init__(self, trainer: Any, rollouts: int) -> None:
        self.trainer, self.left = trainer, rollouts
        self.seen: list[dict[str, Any]] = []

    def generate_samples(self, **options: Any) -> Any:
        self.left -= 1
        self.seen.append(dict(options))
        rollout = self.trainer.args.rollout
        count, n = rollout.batch_size * rollout.n_samples_per_prompt, rollout.n_samples_per_prompt
        logits = self.trainer.actor_model_group._actor_handlers[0].actor.model.logits.detach()
        shares = torch.softmax(logits / options["temperature"], 0).expand(count, WORDS)
        generator = torch.Generator().manual_seed(1000 + self.left)
        words = torch.multinomial(shares, ANSWER, replacement=True, generator=generator)
        return (
            [(f"prompt {k // n}", row) for k, row in enumerate(words)],
            None,
            rollout.batch_size,
            self.left <= 0,
        )


class Maker:
    """Rewards, advantages and old log-probs of the samples, in batches of four."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def make_experience_batch(self, samples: list[Any]) -> list[Experience]:
        return [self._batch(samples[k : k + 4]) for k in range(0, len(samples), 4)]

    def _batch(self, samples: list[Any]) -> Experience:
        policy = self.trainer.actor_model_group._actor_handlers[0].actor.model
        words = torch.stack([row for _, row in samples])
        count = len(words)
        sequences = torch.cat([torch.ones(count, PROMPT, dtype=torch.long), words], 1)
        mask = torch.zeros(count, PROMPT + ANSWER - 1, dtype=torch.long)
        mask[:, PROMPT - 1 :] = 1
        rewards = (words == 0).float().mean(1)
        with torch.no_grad():
            old = policy(sequences, mask)[0]
        zeros = torch.zeros(WORDS).log_softmax(0)
        return Experience(
            sequences=sequences,
            attention_mask=torch.ones_like(sequences),
            action_mask=mask,
            action_log_probs=old.clone(),
            base_action_log_probs=zeros[sequences[:, 1:]],
            advantages=(rewards - 0.2)[:, None] * mask,
            returns=rewards[:, None] * mask,
            prompts=[prompt for prompt, _ in samples],
            labels=[""] * count,
            rewards=rewards,
            response_length=torch.full((count,), float(ANSWER)),
            truncated=torch.zeros(count),
            total_length=torch.full((count,), float(PROMPT + ANSWER)),
            info={"reward": rewards},
        )


class Loader:
    """Prompts, one a batch."""

    def __init__(self, prompts: int) -> None:
        self.prompts = prompts

    def __len__(self) -> int:
        return self.prompts

    def state_dict(self) -> dict[str, Any]:
        return {"at": 1}

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def make(kind: Any, folder: Any, rollouts: int, knobs: Mapping[str, float]) -> Any:
    """A trainer of the class `kind`, with everything that OpenRLHF's launcher would have made around it."""
    torch.manual_seed(0)
    args = arguments(folder, knobs)
    trainer = kind.__new__(kind)
    trainer.generate_kwargs = {"max_len": 64, "max_new_tokens": ANSWER, "temperature": 1.0, "top_p": 1.0}
    trainer.prompts_dataloader, trainer.eval_dataloader = Loader(rollouts * args.rollout.batch_size), None
    policies = [Policy(copy.deepcopy(args), 1000) for _ in range(RANKS)]
    reference = group([Space(model=Space(temperature=1.0))]) if args.algo.kl.init_coef > 0 else None
    tokenizer = Space(decode=lambda *a, **k: ["text"])
    ppo_trainer.BasePPOTrainer.__init__(
        trainer, Space(args=args), group(policies), None, None, reference, None, tokenizer
    )
    trainer.experience_maker = Maker(trainer)
    trainer.samples_generator = Generator(trainer, rollouts)
    return trainer
