"""A run of verl on the CPU, as real as it goes without its engines and samplers.

Real: the composed configuration, `PPOTrainerSync.fit` and `_compute_metrics`, the trainer registry,
`Tracking`, the transfer queue, Ray worker groups with `ActorRolloutRefWorker`'s and `TrainingWorker`'s
own RPCs, `ppo_loss`, `reduce_metrics`, verl's learning-rate schedules. Made up: a "model" of eight
logits in place of an FSDP engine, and answers that are drawn from it in place of a vLLM server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.metric import reduce_metrics
from verl.utils.py_functional import rename_dict
from verl.utils.torch_functional import get_constant_schedule_with_warmup
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.losses import ppo_loss

WORDS, PROMPT, ANSWER = 8, 2, 4

PLACES = {
    "train_batch_size": "data.train_batch_size",
    "rollout_n": "actor_rollout_ref.rollout.n",
    "ppo_mini_batch_size": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "ppo_epochs": "actor_rollout_ref.actor.ppo_epochs",
    "kl_coef": "actor_rollout_ref.actor.kl_loss_coef",
    "clip_range_low": "actor_rollout_ref.actor.clip_ratio_low",
    "clip_range_high": "actor_rollout_ref.actor.clip_ratio_high",
    "actor_learning_rate": "actor_rollout_ref.actor.optim.lr",
    "entropy_coef": "actor_rollout_ref.actor.entropy_coeff",
}


def compose(folder: Any, rollouts: int, knobs: Mapping[str, float], more: tuple[str, ...] = ()) -> Any:
    """verl's own `ppo_trainer.yaml`, resolved as its task runner does it."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from omegaconf import OmegaConf
    from verl.trainer import main_ppo

    lines = [
        "data.train_batch_size=8",
        "+data.gen_batch_size=1",
        "data.max_response_length=4",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
        "actor_rollout_ref.actor.optim.lr=0.05",
        "algorithm.adv_estimator=grpo",
        "trainer.val_before_train=false",
        "trainer.save_freq=-1",
        "trainer.test_freq=-1",
        "trainer.logger=[file]",
        "trainer.n_gpus_per_node=2",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={rollouts}",
        *(f"{PLACES[name]}={int(value) if value == int(value) else value}" for name, value in knobs.items()),
        *(["actor_rollout_ref.actor.use_kl_loss=false"] if knobs.get("kl_coef") == 0 else []),
        *more,
    ]
    place = os.path.join(os.path.dirname(main_ppo.__file__), "config")
    with initialize_config_dir(place, version_base=None):
        config = hydra_compose("ppo_trainer", lines)
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


# ------------------------------------------------------------------------------------- in a worker


class Training(TrainingWorker):
    """verl's `TrainingWorker` with eight logits instead of an engine."""

    def __init__(self, rate: float, warmup: int) -> None:
        self.logits = torch.nn.Parameter(torch.zeros(WORDS))
        optimizer = torch.optim.SGD([self.logits], lr=rate)
        schedule = get_constant_schedule_with_warmup(optimizer, warmup)
        self.engine = SimpleNamespace(optimizer=optimizer, lr_scheduler=schedule)
        self.loss_fn = None

    def infer_batch(self, data: TensorDict) -> TensorDict:
        """Log-probs of prompts and responses, nested [B, PROMPT + ANSWER], each a place early as an LM's."""
        new = torch.log_softmax(self.logits.detach() / tu.get(data, "temperature"), 0)
        rows = [
            torch.cat([torch.zeros(PROMPT - 1), new[words], torch.zeros(1)])
            for words in data["responses"].unbind()
        ]
        log_probs = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        return TensorDict({"log_probs": log_probs}, batch_size=[len(rows)])


class Toy(ActorRolloutRefWorker):
    """verl's worker; only what builds and runs the engine is ours."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.set_dispatch_collect("actor", {"actor": self.rank}, {"actor": True})
        self.begin(self.config.actor)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def begin(self, actor: Any) -> None:
        """The state of a fresh run with this configuration of the actor."""
        self.actor = Training(float(actor.optim.lr), max(int(actor.optim.get("lr_warmup_steps", 0) or 0), 0))
        self.actor.set_loss_fn(partial(ppo_loss, config=omega_conf_to_dataclass(actor)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights(self) -> list[float]:
        return self.actor.logits.detach().tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answers(self, samples: int, seed: int, temperature: float) -> list[list[int]]:
        """[samples, ANSWER] words, drawn at a temperature."""
        generator = torch.Generator().manual_seed(seed)
        shares = torch.softmax(self.actor.logits.detach() / temperature, 0).expand(samples, WORDS)
        return torch.multinomial(shares, ANSWER, replacement=True, generator=generator).tolist()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update(
        self, answers: list[list[int]], advantages: list[float], info: dict[str, Any]
    ) -> dict[str, Any]:
        """Epochs of mini-batches, and the metrics that verl's loss returns, as `train_mini_batch`
        gathers them.
        """
        old = torch.log_softmax(self.actor.logits.detach() / info["temperature"], 0)
        gathered: dict[str, list[Any]] = {}
        size = info["mini_batch_size"]
        for _ in range(info["epochs"]):
            for start in range(0, len(answers), size):
                batch = answers[start : start + size], advantages[start : start + size]
                for key, value in self._step(*batch, old, info).items():
                    gathered.setdefault(key, []).append(value)
        self.actor.engine.lr_scheduler.step()
        gathered["lr"] = [self.actor.engine.lr_scheduler.get_last_lr()[0]]
        return gathered

    def _step(
        self, answers: Any, advantages: Any, old: torch.Tensor, info: dict[str, Any]
    ) -> dict[str, float]:
        words = torch.tensor(answers)
        new = torch.log_softmax(self.actor.logits / info["temperature"], 0)
        data = batch_of(words, torch.tensor(advantages), old)
        flat = torch.cat(
            [torch.zeros(len(words), PROMPT - 1), new[words], torch.zeros(len(words), 1)], 1
        ).reshape(-1)
        output = {"log_probs": flat}
        if info["calculate_entropy"]:
            output["entropy"] = (-(new.exp() * new).sum()).expand(len(flat))
        loss, metrics = self.actor.loss_fn(model_output=output, data=data)
        self.actor.engine.optimizer.zero_grad()
        loss.backward()
        norm = self.actor.logits.grad.norm().item()
        self.actor.engine.optimizer.step()
        numbers = {key: float(getattr(m, "values", [m])[0]) for key, m in metrics.items()}
        return {**numbers, "grad_norm": norm, "loss": loss.item()}


def batch_of(words: torch.Tensor, advantages: torch.Tensor, old: torch.Tensor) -> TensorDict:
    """What `ppo_loss` reads. words [B, ANSWER], advantages [B], old log-probs of every word [WORDS]."""
    count = len(words)
    data = TensorDict(
        {
            "prompts": torch.nested.nested_tensor([torch.ones(PROMPT)] * count, layout=torch.jagged),
            "responses": torch.nested.nested_tensor(list(words), layout=torch.jagged),
            "response_mask": torch.ones(count, ANSWER),
            "old_log_probs": old[words],
            "ref_log_prob": torch.full((count, ANSWER), 1 / WORDS).log(),
            "advantages": advantages[:, None].expand(count, ANSWER).clone(),
        },
        batch_size=[count],
    )
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=count * ANSWER, global_batch_size=count)
    return data


# --------------------------------------------------------------------------------------- the driver


class Sync(PPOTrainerSync):
    """verl's trainer; `init` and one `step` are ours, everything else is verl's."""

    def __init__(self, config: Any, group: Any, samplers: list[Any]) -> None:
        super().__init__(config)
        self.actor_rollout_wg = group
        self.agent_loop_manager = SimpleNamespace(agent_loop_workers=samplers)
        self.distillation_config = None
        self.checkpoint_manager = SimpleNamespace(update_weights=lambda step: None)
        self.resource_pool_manager = SimpleNamespace(get_n_gpus=lambda: 2)
        self.global_steps, self.steps_per_epoch = 0, 10**6
        self.total_training_steps = config.trainer.total_training_steps
        self.train_dataloader = SimpleNamespace(state_dict=dict)
        self.dataloader_state = 0
        group.begin(config.actor_rollout_ref.actor)

    def _shutdown_dump_executor(self) -> None:
        """Nothing was dumped."""

    def _start_profiling(self) -> None:
        """No profiler."""

    def _stop_profiling(self) -> None:
        """No profiler."""

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> Any:
        """Sample, score, update: the configuration is read where verl's `_step_once` reads it."""
        import transfer_queue as tq

        rollout = self.config.actor_rollout_ref.rollout
        prompts, n = self.config.data.train_batch_size, rollout.n
        seen_by_samplers = self.sample_temperature()
        answers = self.actor_rollout_wg.answers(prompts * n, self.global_steps, seen_by_samplers)[0]
        scores = [float(sum(w == 0 for w in words)) / ANSWER for words in answers]
        advantages = _centred(scores, n)
        keys = [f"u{self.global_steps}p{k // n}_{k % n}_0" for k in range(prompts * n)]
        tags = [self._tag() for _ in keys]
        batch = tq.kv_batch_put(
            keys=keys, partition_id="train", fields=_fields(answers, scores, advantages), tags=tags
        )
        old = torch.log_softmax(torch.tensor(self.actor_rollout_wg.weights()[0]) / rollout.temperature, 0)
        rows = [old[torch.tensor(words)] for words in answers]
        column = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        fields = TensorDict({"old_log_probs": column}, batch_size=[len(rows)])
        tq.kv_batch_put(keys=keys, partition_id="train", fields=fields)
        batch.extra_info = {"answers": answers, "advantages": advantages}
        batch = self._update_actor(batch, metrics)
        metrics["actor/entropy"] = 1.5 + 0.01 * (self.global_steps % 7)
        metrics["rollout_corr/k3_kl"] = 1e-4 * (1 + self.global_steps % 5)
        timing_raw.update(gen=0.1, update_actor=0.2, old_log_prob=0.05, ref=0.05)
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """The configuration is read where verl's own reads it."""
        rollout, actor = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.actor
        info = {
            "calculate_entropy": actor.calculate_entropy or actor.entropy_coeff != 0.0,
            "mini_batch_size": actor.ppo_mini_batch_size * rollout.n,
            "epochs": actor.ppo_epochs,
            "temperature": rollout.temperature,
        }
        given = batch.extra_info.pop("answers"), batch.extra_info.pop("advantages")
        output = rename_dict(self.actor_rollout_wg.update(*given, info)[0], "actor/")
        metrics.update(reduce_metrics(output))
        return batch

    def sample_temperature(self) -> float:
        import ray

        worker = self.agent_loop_manager.agent_loop_workers[0]
        return ray.get(worker.temperature.remote())

    def _tag(self) -> dict[str, Any]:
        lengths = {"prompt_len": PROMPT, "response_len": ANSWER, "seq_len": PROMPT + ANSWER}
        step = self.global_steps
        return {"status": "success", **lengths, "min_global_steps": step - 1, "max_global_steps": step - 1}


def _centred(scores: list[float], n: int) -> list[float]:
    groups = [scores[k : k + n] for k in range(0, len(scores), n)]
    return [s - sum(g) / len(g) for g in groups for s in g]


def _fields(answers: list[list[int]], scores: list[float], advantages: list[float]) -> TensorDict:
    """The columns that verl's `_compute_metrics` and our look at the batch ask the queue for."""
    count = len(answers)

    def nested(rows: list[torch.Tensor]) -> torch.Tensor:
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    last = [torch.tensor([0.0] * (ANSWER - 1) + [s]) for s in scores]
    column = [torch.full((ANSWER,), a) for a in advantages]
    return TensorDict(
        {
            "prompts": nested([torch.ones(PROMPT, dtype=torch.int64)] * count),
            "responses": nested([torch.tensor(words) for words in answers]),
            "response_mask": nested([torch.ones(ANSWER, dtype=torch.int64)] * count),
            "advantages": nested(column),
            "returns": nested(column),
            "rm_scores": nested(last),
            "num_turns": torch.full((count,), 2),
        },
        batch_size=[count],
    )


class Sampler:
    """Holds a copy of the configuration, as verl's `AgentLoopWorkerTQ` does; asynchronous like it."""

    def __init__(self, config: Any) -> None:
        self.config = config

    async def temperature(self) -> float:
        return float(self.config.actor_rollout_ref.rollout.temperature)

    async def begin(self, config: Any) -> None:
        self.config = config
