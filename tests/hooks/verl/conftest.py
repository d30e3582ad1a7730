"""One Ray with two CPU workers of verl for the whole session; every run begins afresh on them."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.register_assert_rewrite("autotune.testing.adapters")
collect_ignore = [] if importlib.util.find_spec("verl") else ["toy.py"]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The worker group and the samplers, started once: their processes take seconds to import verl."""
    pytest.importorskip("verl")
    import ray
    import transfer_queue as tq
    from ray import cloudpickle
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls

    from tests.hooks.verl import toy

    cloudpickle.register_pickle_by_value(toy)
    os.environ["VERL_FILE_LOGGER_ROOT"] = str(tmp_path_factory.mktemp("verl-log"))
    paths = os.pathsep.join([str(Path.cwd()), *sys.path])
    env = {"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False, runtime_env=env)
    config = toy.compose(tmp_path_factory.mktemp("verl"), 1, {})
    worker = RayClassWithInitArgs(
        ray.remote(toy.Toy), config=config.actor_rollout_ref, role="actor_rollout_ref"
    )
    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    together = create_colocated_worker_cls({"actor_rollout_ref": worker})
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=together, use_gpu=False, device_name="cpu")
    group = group.spawn(prefix_set={"actor_rollout_ref"})["actor_rollout_ref"]
    group.init_model()
    samplers = [ray.remote(toy.Sampler).remote(config) for _ in range(2)]
    tq.init(config.transfer_queue)
    yield SimpleNamespace(group=group, samplers=samplers, toy=toy)
    tq.close()
    ray.shutdown()


Start = Callable[..., Any]


@pytest.fixture
def start(cluster: Any, tmp_path: Path) -> Start:
    """Makes a trainer whose workers are as fresh as after verl's own start."""
    from autotune.hooks.verl.trainer import with_autotune

    count = [0]

    def begin(
        rollouts: int = 2,
        knobs: Mapping[str, float] | None = None,
        more: tuple[str, ...] = (),
        **autotune: Any,
    ) -> Any:
        import ray
        from omegaconf import OmegaConf, open_dict

        count[0] += 1
        config = cluster.toy.compose(tmp_path / f"run{count[0]}", rollouts, knobs or {}, more)
        if autotune:
            with open_dict(config):
                config.autotune = OmegaConf.create(autotune)
        ray.get([sampler.begin.remote(config) for sampler in cluster.samplers])
        return with_autotune(cluster.toy.Sync)(config, cluster.group, cluster.samplers)

    return begin
