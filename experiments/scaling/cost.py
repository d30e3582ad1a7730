"""Seconds of a rollout on N GPUs: what is divided by them, what is not, and what they say to each other.

    rollout(N) = sample_fixed + sample_shared / N                 decoding waits for its longest response
               + compute / N                                      passes with and without gradient
               + updates * volume(stage, N) / bandwidth(N)        gradients and weights between ranks
               + sync                                             weights to the sampler
               + rest                                             rewards, metrics, the controller

Two measured points (one GPU and two) give `sample_fixed`, `sample_shared` and `compute`; the rest is sizes
and bandwidths. Volumes per update and rank, Rajbhandari et al. 2020 (ZeRO), 2 bytes a number, rings:

    stages 1 and 2   reduce-scatter of gradients, all-gather of weights           2 * (N - 1) / N * 2 P
    stage 3          all-gather before forward and before backward, and           3 * (N - 1) / N * 2 P
                     reduce-scatter, for every micro batch of an update

What it leaves out: overlap of communication with computation (so it is an upper bound there), stragglers,
response lengths that grow, pipeline or tensor parallelism, and a network that others use too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NODE = 8
"""GPUs of one machine."""
NVLINK = 450e9
"""Bytes/s of one GPU in each direction over NVLink 4 (NVIDIA H200 data sheet: 900 GB/s both)."""
NETWORK = 50e9
"""Bytes/s of one GPU between machines: 400 Gb/s InfiniBand NDR, one port a GPU (DGX H200 data sheet)."""
WIDTH = 2
"""Bytes of a weight or a gradient on its way, bfloat16."""


@dataclass(frozen=True, slots=True)
class Run:
    """What decides the traffic."""

    parameters: float
    updates: int
    """Per rollout."""
    micro_batches: int
    """Of an update, on one GPU; more GPUs share them."""
    stage: int


@dataclass(frozen=True, slots=True)
class Point:
    """Measured seconds of one rollout."""

    gpus: int
    sample: float
    train: float
    """Old log-probs and updates."""
    sync: float
    total: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds on one GPU, by how they behave."""

    sample_fixed: float
    sample_shared: float
    compute: float
    sync: float
    rest: float


def bandwidth(gpus: int) -> float:
    """The slowest link of a ring over so many GPUs, bytes/s."""
    return NVLINK if gpus <= NODE else NETWORK


def traffic(run: Run, gpus: int) -> float:
    """Bytes that a rank sends in one rollout."""
    if gpus == 1:
        return 0.0
    once = (gpus - 1) / gpus * WIDTH * run.parameters
    passes = max(-(-run.micro_batches // gpus), 1)
    return run.updates * once * (3 * passes if run.stage == 3 else 2)


def communication(run: Run, gpus: int) -> float:
    """Seconds of it, not overlapped."""
    return traffic(run, gpus) / bandwidth(gpus)


def fit(points: Sequence[Point]) -> Costs:
    """From one GPU and, where it was measured, another number.

    Sampling is a + b / N through both points; from one GPU alone all of it is taken as fixed, which is
    what a small model's decoding is.

    Raises:
        ValueError: one GPU was not measured.
    """
    one = next((p for p in points if p.gpus == 1), None)
    if one is None:
        raise ValueError(f"received points of {[p.gpus for p in points]} GPUs; expected one of them to be 1")
    more = next((p for p in points if p.gpus > 1), None)
    shared = 0.0
    if more is not None:
        share = 1 - 1 / more.gpus
        shared = min(max((one.sample - more.sample) / share, 0.0), one.sample)
    rest = max(one.total - one.sample - one.train - one.sync, 0.0)
    return Costs(one.sample - shared, shared, one.train, one.sync, rest)


def rollout(costs: Costs, run: Run, gpus: int) -> float:
    """Seconds of a rollout on so many GPUs, the same global batch."""
    sample = costs.sample_fixed + costs.sample_shared / gpus
    return sample + costs.compute / gpus + communication(run, gpus) + costs.sync + costs.rest


def overlapped(costs: Costs, run: Run, trainers: int, servers: int) -> float:
    """Seconds of a rollout one step off: the longer of sampling and training, on GPUs of their own."""
    sample = costs.sample_fixed + costs.sample_shared / servers
    train = costs.compute / trainers + communication(run, trainers)
    return max(sample, train) + costs.sync + costs.rest
