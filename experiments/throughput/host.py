"""What a vLLM engine's own bookkeeping costs per token: sampling with a model that costs next to nothing.

    python -m experiments.throughput.host              one server process, then two, then one, then two

A decoding step is the model's kernels on the device and, before and after them, Python that looks at every
running sequence. With one layer of 64 numbers the second is what is left. Needs vLLM, or its CPU build.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from autotune.recipe.schema import ServerSection
from autotune.trainer.rollout.client import ServerEngine
from autotune.trainer.rollout.several import SeveralEngines
from autotune.trainer.rollout.vllm_engine import EngineOptions, Request, Sampling
from experiments.throughput.work import Work, make_model

SAMPLING = Sampling(temperature=1.0, max_tokens=Work().longest, end_ids=(7, 8, 9, 10, 11, 12))
"""Random weights draw one of six ends among 512 tokens: responses of 80 tokens on average."""
WARM_UP = 2


def requests(work: Work, seed: int) -> list[Request]:
    """Groups as a rollout asks for them, log-probs for every eighth."""
    drawn = random.Random(seed)
    prompts = [[drawn.randrange(20, 500) for _ in range(35)] for _ in range(work.prompts)]
    return [Request(prompt, work.group, None, i % 8 == 0) for i, prompt in enumerate(prompts)]


def measured(model: Path, servers: int, rollouts: int) -> tuple[list[float], list[int]]:
    """Seconds and response tokens of some rollouts."""
    work, seconds, tokens = Work(), [], []
    options = EngineOptions(str(model), "float32", 1, work.samples, max_model_len=320, kv_cache_bytes=1 << 29)
    engines = [ServerEngine(options, ServerSection(), rank) for rank in range(servers)]
    with closing(SeveralEngines(engines)) as engine:
        for rollout in range(WARM_UP + rollouts):
            asked, began = requests(work, rollout), time.perf_counter()
            made = engine.generate(asked, SAMPLING)
            seconds.append(time.perf_counter() - began)
            tokens.append(int(made.lengths.sum()))
    return seconds[WARM_UP:], tokens[WARM_UP:]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 1, 2])
    parser.add_argument("--rollouts", type=int, default=6)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("least", Path(folder), None)
        for servers in options.servers:
            seconds, tokens = measured(model, servers, options.rollouts)
            each = 1e6 * sum(seconds) / sum(tokens)
            print(
                f"{servers} server(s): {statistics.median(seconds):.3f} s ({min(seconds):.3f} to"
                f" {max(seconds):.3f}) for {statistics.median(tokens):.0f} tokens, {each:.1f} us a token",
                flush=True,
            )


if __name__ == "__main__":
    main()
