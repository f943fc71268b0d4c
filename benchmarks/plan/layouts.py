"""Prints the memory of each layout per device, as the compiler reports it.

    python benchmarks/plan/layouts.py            # eight emulated CPU devices; nothing runs
    python benchmarks/plan/layouts.py --row 3    # the fourth row alone

Shape: 4 layers x d_model 256, d_ff 688, 8 heads, 4 kv heads, vocabulary 4096, 8 x 256
tokens, float32, AdamW.
"""

import argparse
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp

from jaxdist.models.transformer import Transformer, TransformerConfig
from jaxdist.optim.config import OptimizerConfig
from jaxdist.optim.schedules import build_schedule
from jaxdist.parallel.mesh import MeshConfig, build_mesh, resolve_mesh
from jaxdist.parallel.sharding import build_rules
from jaxdist.protocols.model_spec import describe
from jaxdist.step.step_config import StepConfig
from jaxdist.step.train_step import build_train_step

MODEL = TransformerConfig(
    vocab_size=4096,
    num_layers=4,
    d_model=256,
    d_ff=688,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
)
BATCH, LENGTH = 8, 256
ROWS = [
    (MeshConfig(), 1, "dots"),
    (MeshConfig(), 1, "full"),
    (MeshConfig(), 1, "none"),
    *((MeshConfig(fsdp=8, zero=zero), 8, "full") for zero in (0, 1, 2, 3)),
    (MeshConfig(fsdp=8), 8, "dots"),
    (MeshConfig(fsdp=8), 8, "none"),
    (MeshConfig(fsdp=2, tensor=4), 8, "full"),
    (MeshConfig(fsdp=2, tensor=4, sequence_parallel=True), 8, "full"),
    (MeshConfig(data=2, fsdp=2, tensor=2), 8, "full"),
]


def memory(config: MeshConfig, devices: int, remat: str):
    """Returns the compiled step's memory analysis."""
    spec = describe(lambda rngs: Transformer(MODEL, rngs=rngs))
    optimizer = OptimizerConfig()
    step = build_train_step(
        spec,
        optimizer,
        build_schedule(optimizer, 1000, BATCH),
        build_mesh(config, jax.devices()[:devices]),
        build_rules(config, resolve_mesh(config, devices)),
        StepConfig(remat=remat),
    )
    fields = dict.fromkeys(
        ("tokens", "targets", "positions"), ((BATCH, LENGTH), jnp.int32)
    )
    fields |= {
        "weights": ((BATCH, LENGTH), jnp.float32),
        "sample": ((BATCH,), jnp.int32),
    }
    batch = {name: jax.ShapeDtypeStruct(*field) for name, field in fields.items()}
    return (
        step.step.lower(step.abstract_state, step.abstract_batch(batch))
        .compile()
        .memory_analysis()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--row", type=int, help="number of the only row to print, from 0; default: all"
    )
    chosen = parser.parse_args().row
    rows = ROWS if chosen is None else ROWS[chosen : chosen + 1]
    print("| layout | zero | remat | arguments MB | donated MB | temporary MB |")
    print("|---|---|---|---|---|---|")
    for config, devices, remat in rows:
        found = memory(config, devices, remat)
        sizes = (
            found.argument_size_in_bytes,
            found.alias_size_in_bytes,
            found.temp_size_in_bytes,
        )
        name = str(resolve_mesh(config, devices)) + (
            ", sequence" * config.sequence_parallel
        )
        print(
            f"| {name} | {config.zero} | {remat} |",
            *(f"{n / 1e6:.1f} |" for n in sizes),
            flush=True,
        )


if __name__ == "__main__":
    main()
