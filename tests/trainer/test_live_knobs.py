"""Every knob, changed in mid-run by a schedule, is what the next rollout and its updates really use.

One real run follows a schedule that moves one knob after the other, through the same loop, adapter and
journal as under a controller. Probes sit where the numbers are used: around `generate`, on the model's
forward passes, on torch's own optimizer steps and inside the loss. `PROOFS` says for each knob how its
value is computed from what the probes saw; that must be the schedule's value in every single rollout,
so each knob also proves that the fourteen others left it alone.

`docs/knobs.md` is this table: `python tests/trainer/test_live_knobs.py > docs/knobs.md` writes it anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from autotune.knobs import KNOBS, batch_problems
from autotune.recipe import KnobSchedule, knob_vector, recipe_facts

if TYPE_CHECKING:
    from torch import Tensor

    from autotune.recipe import Recipe
    from autotune.trainer.loop import Trainer

MakeRecipe = Callable[..., "Recipe"]
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Seen:
    """What the probes saw during one rollout; one entry per call."""

    prompts: list[int] = field(default_factory=list)
    """Prompts handed to the sampler, P."""
    prompt_width: list[int] = field(default_factory=list)
    """Columns of these prompts."""
    generated: list[int] = field(default_factory=list)
    """Rows of each call of the model's `generate`."""
    new_tokens: list[int] = field(default_factory=list)
    """Cap of each call of `generate`."""
    siblings: set[int] = field(default_factory=set)
    """Sample indices within a group that noise was drawn for."""
    sampling_temperature: list[float] = field(default_factory=list)
    """Logits of the model over what was sampled from, before the noise."""
    loss_temperature: list[float] = field(default_factory=list)
    """Logits of the model over those that log-probs were taken of."""
    forward_rows: list[int] = field(default_factory=list)
    """Rows of each forward pass with gradient."""
    rows_by_step: list[int] = field(default_factory=lambda: [0])
    """Rows between one optimizer step and the next."""
    rates: dict[str, list[float]] = field(default_factory=lambda: {"actor": [], "critic": []})
    """`param_groups` of torch's optimizer at each of its steps."""
    clip: list[tuple[float, float]] = field(default_factory=list)
    """Where the clipped objective ends below and above 1."""
    kl_weight: list[float] = field(default_factory=list)
    """Loss minus the loss without KL, over the mean KL."""
    entropy_weight: list[float] = field(default_factory=list)
    """Loss without the bonus minus the loss, over the mean entropy."""


def same(values: list[float]) -> float:
    """The one value that all calls had."""
    assert values, "the probe saw nothing"
    assert max(values) - min(values) <= 1e-3 * max(abs(v) for v in values), values
    return values[0]


def samples(seen: Seen) -> int:
    return sum(seen.generated)


def updates(seen: Seen) -> list[int]:
    """Rows of each update; what follows the last step belongs to none."""
    return [rows for rows in seen.rows_by_step if rows]


def widest(seen: Seen) -> float:
    """The cap where it binds: the longest prompt has five tokens."""
    return max(seen.prompt_width)


PROOFS: dict[str, tuple[str, Callable[[Seen], float]]] = {
    "train_batch_size": (
        "prompts that the sampler was handed",
        lambda seen: sum(seen.prompts) / len(seen.prompts),
    ),
    "rollout_n": (
        "different sample indices within a group that noise was drawn for",
        lambda seen: len(seen.siblings),
    ),
    "ppo_mini_batch_size": (
        "rows that went forward with gradient between two steps of torch's optimizer, over `rollout_n`",
        lambda seen: same([rows / len(seen.siblings) for rows in updates(seen)]),
    ),
    "ppo_epochs": (
        "rows of all updates over the samples of the rollout",
        lambda seen: sum(updates(seen)) / samples(seen),
    ),
    "micro_batch_size": (
        "rows of each forward pass with gradient",
        lambda seen: same([float(rows) for rows in seen.forward_rows]),
    ),
    "rollout_micro_batch_size": (
        "rows of each call of the model's `generate`",
        lambda seen: same([float(rows) for rows in seen.generated]),
    ),
    "num_rollout_batches": (
        "calls of the model's `generate`",
        lambda seen: len(seen.generated),
    ),
    "kl_coef": (
        "the loss minus the loss without its KL term, over the mean KL of the same tokens",
        lambda seen: same(seen.kl_weight),
    ),
    "clip_range_low": (
        "1 minus the lowest ratio that the objective still follows when a response is blamed",
        lambda seen: same([1 - low for low, _ in seen.clip]),
    ),
    "clip_range_high": (
        "the highest ratio that the objective still follows when a response is praised, minus 1",
        lambda seen: same([high - 1 for _, high in seen.clip]),
    ),
    "actor_learning_rate": (
        "`param_groups` of the actor's torch optimizer at each of its steps",
        lambda seen: same(seen.rates["actor"]),
    ),
    "critic_learning_rate": (
        "`param_groups` of the critic's torch optimizer at each of its steps (`algorithm: ppo`)",
        lambda seen: same(seen.rates["critic"]),
    ),
    "max_prompt_length": (
        "columns of the prompts that the sampler was handed, where prompts are longer than the cap",
        widest,
    ),
    "max_response_length": (
        "`max_new_tokens` of each call of the model's `generate`",
        lambda seen: same([float(cap) for cap in seen.new_tokens]),
    ),
    "temperature": (
        "the model's logits over those sampled from, and over those that log-probs were taken of: both",
        lambda seen: same([*seen.sampling_temperature, *seen.loss_temperature]),
    ),
    "entropy_coef": (
        "the loss without its bonus minus the loss, over the mean entropy of the same tokens",
        lambda seen: same(seen.entropy_weight) if seen.entropy_weight else 0.0,
    ),
}
"""Knob -> (how its value is computed from what was used, the computation)."""

START = {"max_prompt_length": 4, "kl_coef": 0.05}
MOVES: tuple[dict[str, float], ...] = (
    {"actor_learning_rate": 0.004},
    {"kl_coef": 0.2},
    {"clip_range_low": 0.1},
    {"clip_range_high": 0.3},
    {"temperature": 0.8},
    {"entropy_coef": 0.02},
    {"ppo_epochs": 2},
    {"ppo_mini_batch_size": 4},
    {"micro_batch_size": 8},
    {"rollout_micro_batch_size": 16, "num_rollout_batches": 2},
    {"num_rollout_batches": 4, "rollout_micro_batch_size": 8},
    {"max_response_length": 4},
    {"max_prompt_length": 3},
    {"rollout_n": 2, "num_rollout_batches": 2},
    {"train_batch_size": 4, "num_rollout_batches": 1},
)
"""What the schedule moves after each rollout; beside a cause, what follows from it."""


class Probes:
    """Listens to one trainer; `seen[t]` is rollout t."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.seen: dict[int, Seen] = {}
        self._now = Seen()
        self._logits: Any = None  # of the model's last forward pass
        self._inside = False  # a probe's own calls of the loss are not probed

    def on_phase(self, phase: str, rollout: int) -> None:
        """A rollout's own record; evaluations before it and after it are nobody's."""
        if phase == "rollout":
            self.seen[rollout] = self._now = Seen()
        elif phase == "on_rollout":
            self._now = Seen()

    def attach(self, trainer: Trainer) -> Callable[[], None]:
        """Put every probe in its place; returns what removes the global one."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._sampler(trainer)
        self._model(trainer)
        self._loss()
        engines = {id(trainer.parts.engine._optimizer): "actor"}
        if trainer.parts.critic is not None:
            engines[id(trainer.parts.critic.engine._optimizer)] = "critic"

        def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
            whose = engines[id(optimizer)]
            self._now.rates[whose].extend(float(group["lr"]) for group in optimizer.param_groups)
            if whose == "actor":
                self._now.rows_by_step.append(0)

        return register_optimizer_step_post_hook(stepped).remove

    def _sampler(self, trainer: Trainer) -> None:
        from autotune.trainer.rollout.choice import Perturb
        from tests.trainer.whole_noise import gumbel_noise

        sample, generate = trainer.parts.sampler.sample, trainer.parts.model.generate
        perturb = Perturb.__call__

        def sampled(prompts: Any, prompt_of: Tensor, sample_of: Tensor, draw: Any) -> Any:
            self._now.prompts.append(prompts.ids.shape[0])
            self._now.prompt_width.append(prompts.ids.shape[1])
            self._now.siblings |= set(sample_of.tolist())
            return sample(prompts, prompt_of, sample_of, draw)

        def generated(**kwargs: Any) -> Any:
            self._now.generated.append(kwargs["input_ids"].shape[0])
            self._now.new_tokens.append(kwargs["generation_config"].max_new_tokens)
            return generate(**kwargs)

        def perturbed(processor: Any, ids: Tensor, scores: Tensor) -> Tensor:
            position = int(processor._position)
            result = perturb(processor, ids, scores)
            added = gumbel_noise(processor._keys, position, scores.shape[1])
            self._now.sampling_temperature.append(ratio(scores.float(), result - added))
            return result

        self._patch.setattr(trainer.parts.sampler, "sample", sampled)
        self._patch.setattr(trainer.parts.model, "generate", generated)
        self._patch.setattr(Perturb, "__call__", perturbed)

    def _model(self, trainer: Trainer) -> None:
        import torch

        from autotune.trainer import forward

        def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            self._logits = output.logits
            if torch.is_grad_enabled():
                rows = kwargs["input_ids"].shape[0]
                self._now.forward_rows.append(rows)
                self._now.rows_by_step[-1] += rows

        trainer.parts.model.register_forward_hook(after, with_kwargs=True)
        logits = forward.response_logits

        def divided(model: Any, batch: Any, temperature: float) -> Tensor:
            self._logits = None
            result = logits(model, batch, temperature)
            if self._logits is not None:  # the reference is another model
                self._now.loss_temperature.append(ratio(self._logits.float(), result))
            return result

        self._patch.setattr(forward, "response_logits", divided)

    def _loss(self) -> None:
        import torch

        from autotune.trainer import losses, update

        loss, surrogate = losses.policy_loss, losses.surrogate

        def limits(ratios: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
            """Follow the objective to both of its ends with the very limits of this call."""
            if not self._inside:
                praised = surrogate(torch.tensor(100.0), torch.tensor(1.0), low, high)
                blamed = -surrogate(torch.tensor(0.0), torch.tensor(-1.0), low, high)
                self._now.clip.append((float(blamed), float(praised)))
            return surrogate(ratios, advantages, low, high)

        def weighed(
            new: Tensor, old: Tensor, ref: Tensor | None, entropy: Tensor | None,
            advantages: Tensor, mask: Tensor, counts: Any, knobs: Any, importance: Tensor | None = None,
        ) -> Tensor:  # fmt: skip
            result = loss(new, old, ref, entropy, advantages, mask, counts, knobs, importance)
            self._inside = True
            with torch.no_grad():

                def part(**without: float) -> float:
                    other = replace(knobs, **without)
                    rest = loss(new, old, ref, entropy, advantages, mask, counts, other, importance)
                    return float(result.double() - rest.double()) * counts.tokens

                if ref is not None:
                    kl = float(losses.k3(losses.log_ratio(ref, new)).double()[mask].sum())
                    if kl > 0.05:  # or rounding is all there is
                        self._now.kl_weight.append(part(kl_coef=0.0) / kl)
                if entropy is not None:
                    bonus = float(entropy.double()[mask].sum())
                    self._now.entropy_weight.append(-part(entropy_coef=0.0) / bonus)
            self._inside = False
            return result

        self._patch.setattr(losses, "surrogate", limits)
        self._patch.setattr(update, "policy_loss", weighed)


def ratio(raw: Tensor, divided: Tensor) -> float:
    """raw / divided by least squares: exact where the one is a multiple of the other."""
    raw, divided = raw.detach().double().flatten(), divided.detach().double().flatten()
    return float((raw * divided).sum() / divided.square().sum())


def schedule_for(recipe: Recipe, moves: tuple[dict[str, float], ...]) -> KnobSchedule:
    changes = [{"rollout": i + 1, "knobs": move} for i, move in enumerate(moves)]
    return KnobSchedule.model_validate({"start": knob_vector(recipe), "changes": changes})


@dataclass
class Run:
    """A run that followed its schedule."""

    schedule: KnobSchedule
    seen: dict[int, Seen]
    lines: list[dict[str, Any]]


def follow(recipe: Recipe, moves: tuple[dict[str, float], ...], folder: Path) -> Run:
    """Train under the schedule with the program's own loop, adapter and journal, probed."""
    from autotune.hooks.loop import ControlLoop
    from autotune.hooks.native import NativeAdapter
    from autotune.hooks.schedule import ScheduleFollower
    from autotune.journal import Journal, read_journal
    from autotune.trainer.loop import Trainer

    schedule = schedule_for(recipe, moves)
    with pytest.MonkeyPatch.context() as monkeypatch:
        probes = Probes(monkeypatch)
        trainer = Trainer(recipe, folder, on_phase=probes.on_phase)
        remove = probes.attach(trainer)
        try:
            adapter = NativeAdapter(trainer)
            folder.mkdir(exist_ok=True)
            with Journal(folder / "journal.jsonl") as journal:
                trainer.run(ControlLoop(adapter, ScheduleFollower(schedule), journal).on_rollout)  # type: ignore[arg-type]
        finally:
            remove()
            trainer.close()
    return Run(schedule, probes.seen, read_journal(folder / "journal.jsonl"))


@pytest.fixture(scope="module")
def recipes(tiny_folder: Path, tiny_prompts: Path) -> MakeRecipe:
    def make(**trainer: Any) -> Recipe:
        from autotune.recipe import Recipe

        batches = {"train_batch_size": 8, "rollout_n": 4, "ppo_mini_batch_size": 2, "micro_batch_size": 4}
        fixed = {**batches, "rollout_micro_batch_size": 32, "max_response_length": 6}
        fixed["actor_learning_rate"] = 0.01
        return Recipe.model_validate(
            {
                "seed": 3,
                "model": {"path": str(tiny_folder)},
                "task": {"type": "jsonl", "path": str(tiny_prompts)},
                "rewards": [{"type": "regex", "pattern": r"(\d)"}],
                "eval": {"every": 0, "prompts": 4},
                "checkpoint": {"every": 1000},
                "trainer": {**fixed, **trainer},
            }
        )

    return make


@pytest.fixture(scope="module")
def run(recipes: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    recipe = recipes(rollouts=len(MOVES) + 1, **START)
    yield follow(recipe, MOVES, tmp_path_factory.mktemp("live") / "run")


@pytest.fixture(scope="module")
def critic_run(recipes: MakeRecipe, tmp_path_factory: pytest.TempPathFactory) -> Run:
    recipe = recipes(rollouts=3, algorithm="ppo", critic_learning_rate=0.02, **START)
    moves = ({"critic_learning_rate": 0.005}, {"actor_learning_rate": 0.001})
    return follow(recipe, moves, tmp_path_factory.mktemp("critic") / "run")


def test_the_table_and_the_schedule_name_every_knob(recipes: MakeRecipe) -> None:
    assert list(PROOFS) == list(KNOBS)
    moved = {name for move in MOVES for name in move}
    assert moved == set(KNOBS) - {"critic_learning_rate"}
    vectors = schedule_for(recipes(**START), MOVES)
    assert not any(batch_problems(vectors.vector(t), 1) for t in range(len(MOVES) + 1))


@pytest.mark.parametrize("knob", [name for name in PROOFS if name != "critic_learning_rate"])
def test_what_a_rollout_used_is_what_the_schedule_says(run: Run, knob: str) -> None:
    used = {t: PROOFS[knob][1](seen) for t, seen in run.seen.items()}
    wanted = {t: run.schedule.vector(t)[knob] for t in run.seen}
    assert used == {t: pytest.approx(value, rel=2e-3) for t, value in wanted.items()}
    assert len(set(wanted.values())) > 1 and len(used) == len(MOVES) + 1


@pytest.mark.parametrize("knob", ["critic_learning_rate", "actor_learning_rate"])
def test_the_critic_s_rate_is_moved_and_the_actor_s_by_itself(critic_run: Run, knob: str) -> None:
    used = [PROOFS[knob][1](seen) for seen in critic_run.seen.values()]
    assert used == pytest.approx([critic_run.schedule.vector(t)[knob] for t in range(3)], rel=1e-6)
    assert len(set(used)) == 2


def test_every_change_was_read_back_and_journalled(run: Run) -> None:
    lines = [line for line in run.lines if line["type"] == "rollout"]
    for line, move in zip(lines, (*MOVES, {}), strict=True):
        applied = {item["knob"]: item["read_back"] for item in line["applied"] if not item["error"]}
        then = run.schedule.vector(line["rollout"] + 1)
        assert applied.items() <= then.items() and move.keys() <= applied.keys()


def test_the_number_of_optimizer_steps_is_u(run: Run) -> None:
    for t, seen in run.seen.items():
        vector = run.schedule.vector(t)
        updates_wanted = vector["train_batch_size"] / vector["ppo_mini_batch_size"] * vector["ppo_epochs"]
        assert len(seen.rates["actor"]) == updates_wanted


# ---------------------------------------------------------------------------------------- the page

HEAD = """# Knobs and how it is proven that they take effect

Every knob below can be moved in a running training: by the controller, by `autotune ctl RUN set`, or by a
schedule. A new value is set, read back from where the trainer keeps it, journalled, and used by the whole
next rollout: its samples, its log-probs and all of its updates. No knob needs a restart.

The last column is a test (`tests/trainer/test_live_knobs.py`): a real run follows a schedule that moves one
knob after the other, and the value computed from what was *used* must be the schedule's in every rollout.
This page is written by that file.

| knob | counts | it is | controller's range | takes effect | proven by |
|---|---|---|---|---|---|
"""

NOTES = """
`clip_range` stands for both of its sides. What only changes speed and memory follows by itself when its cause
moves: `micro_batch_size` from `ppo_mini_batch_size` and `rollout_n`; `rollout_micro_batch_size` and
`num_rollout_batches` from the amount of data and from each other. `actor_learning_rate` and
`critic_learning_rate` are the peaks of `lr_schedule`.

Some values cannot be had in some runs, and are refused with the reason while everything stays as it was:
`kl_coef` when the recipe's own is 0 (no reference model was built), sizes off the divisor lattice, lengths
beyond the model's context, and a `max_prompt_length` under which no prompt would be left (`prompt_cut: drop`)
or some would be too long (`prompt_cut: error`).
"""


def page() -> str:
    from autotune.recipe import Recipe

    critic = Recipe.model_validate({"trainer": {"algorithm": "ppo"}})
    capability = recipe_facts(critic).knob_capability
    rows = []
    for name, spec in KNOBS.items():
        effect = str(capability[name].state).replace("_", " ")
        span = f"{spec.low:g} to {spec.high:g}"
        unit = "" if spec.unit == "1" else spec.unit
        rows.append(f"| `{name}` | {unit} | {spec.what} | {span} | {effect} | {PROOFS[name][0]} |\n")
    return HEAD + "".join(rows) + NOTES


def test_the_page_is_this_table() -> None:
    assert (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8") == page()


if __name__ == "__main__":
    print(page(), end="")
