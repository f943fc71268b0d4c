"""A small model on a pipeline of stages, and a batch for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdist.models.transformer import TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel import mesh as meshes
from jaxdist.parallel import sharding
from jaxdist.parallel.pipeline.partition import PipelineConfig, Staging
from jaxdist.parallel.remat import RematConfig
from jaxdist.step.loss_scale import DynamicLossScale
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import TrainStep, build_train_step
from support.models import TINY, batch_of, spec_of

# Eight layers, and no loss of interest is left out: z-loss, grouped heads, unequal
# weights.
MODEL = replace(TINY, num_layers=8, num_kv_heads=2, z_loss=1e-4)
SEVEN = replace(MODEL, num_layers=7)
OPTIMIZER = OptimizerConfig(name="sgd", learning_rate=0.1, warmup_steps=1)
BATCH, LENGTH = 16, 16


class Case(NamedTuple):
    """A pipeline on a mesh, and what flows through it."""

    stages: int = 2
    microbatches: int = 4
    chunks: int = 1
    schedule: str = "1f1b"
    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    zero: int = 3
    accumulation: int = 1
    edges: Any = "sharded"
    gather_once: bool = False
    remat: str = "layers"
    compute: str = "float32"
    model: TransformerConfig = MODEL
    packed: bool = False
    every: int = 1  # layers that B computes again together, each under `full`

    @property
    def devices(self) -> int:
        return self.stages * self.data * self.fsdp * self.tensor

    @property
    def config(self) -> PipelineConfig:
        return PipelineConfig(
            self.schedule,
            self.microbatches,
            self.chunks,
            self.edges,
            self.gather_once,
            self.remat,
        )

    @property
    def staging(self) -> Staging | None:
        period = len(self.model.layer_pattern)
        recompute = RematConfig("full", every=self.every)
        # every stage has the first dense layers
        depth = self.model.num_layers - self.model.first_dense_layers
        cut = Staging(self.config, depth, self.stages, period, recompute=recompute)
        return cut if self.stages > 1 else None


def build(
    case: Case,
    remat: str = "dots",
    optimizer: OptimizerConfig = OPTIMIZER,
    moments_in: str | None = None,
    params_in: str | None = None,
    loss_scale: DynamicLossScale | None = None,
) -> TrainStep:
    config = meshes.MeshConfig(
        pipeline=case.stages,
        data=case.data,
        fsdp=case.fsdp,
        tensor=case.tensor,
        zero=case.zero,
    )
    mesh = meshes.build_mesh(config, jax.devices()[: case.devices])
    rules = sharding.build_rules(
        config,
        meshes.resolve_mesh(config, case.devices),
        vocab_over_stages=case.edges == "sharded",
    )
    step = StepConfig(
        accumulation=case.accumulation,
        compute=case.compute,
        remat=remat,
        moments_in=moments_in,
        params_in=params_in,
        loss_scale=loss_scale,
        staging=case.staging,
    )
    rate = build_schedule(optimizer, 1000, BATCH)
    return build_train_step(spec_of(case.model), optimizer, rate, mesh, rules, step)


def batch_for(case: Case) -> dict[str, Any]:
    batch = batch_of(case.model, BATCH, LENGTH)
    # two documents a row, cut at another place in each, and padding in one
    if case.packed:
        cut = np.arange(BATCH)[:, None] % (LENGTH - 4) + 2
        row = np.arange(LENGTH)[None, :]
        second = row >= cut
        batch["segment_ids"] = (1 + second).astype(np.int32)
        batch["positions"] = np.where(second, row - cut, row).astype(np.int32)
        batch["segment_ids"][3, 12:], batch["weights"][3, 12:] = 0, 0
    return batch
