"""Compiles attention over split sequences for absent TPUs, and records its memory.

    python benchmarks/plan/context_memory.py --out benchmarks/results/tpu-context-memory.json

A case is form:tokens:devices, such as heads:32768:8. It is attention with its gradients
for one bfloat16 sequence with the heads of Llama 3 8B (32 query heads, 8 key heads,
size 128) over that many chips of v5p. Temporary bytes are those of one device. With
--out, cases that the file has are skipped; delete the file to compile them again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import jax.numpy as jnp
import measuring
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxdist.ops.attention import attention
from jaxdist.parallel import execution, mesh, sharding
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.context import AXIS
from jaxdist.planner import targets

HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
TARGETS = {2: "v5p:2x2x1", 4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4"}
# Each column of a row has twice the tokens and twice the devices of the one before.
# tokens of a device
SIZES = {"heads": (4096, 8192), "gather": (4096,), "ring": (4096,)}
CASES = [
    f"{form}:{own * devices}:{devices}"
    for form, sizes in SIZES.items()
    for own in sizes
    for devices in TARGETS
    if own * devices >= 8192
]


def compiled(form: str, tokens: int, devices: int) -> jax.stages.Compiled:
    """Returns the program of attention and its gradients, of one sequence over so many
    devices.
    """
    chips = targets.devices(targets.parse(TARGETS[devices]))[:devices]
    shape = mesh.MeshShape(
        {axis: devices if axis == AXIS else 1 for axis in AXES}, dict.fromkeys(AXES, 1)
    )
    over = Mesh(
        mesh.arrange(shape, chips), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )
    rules = sharding.Rules(shape, 3, attention=form)

    def loss(q, k, v, weight):
        with execution.activate(over, rules):
            return jnp.sum((attention(q, k, v) * weight).astype(jnp.float32))

    def abstract(heads: int, name: str) -> jax.ShapeDtypeStruct:
        dims = (1, tokens, heads, HEAD_SIZE)
        spec = rules.activation(("batch", "sequence", name, None), dims)
        return jax.ShapeDtypeStruct(
            dims, jnp.bfloat16, sharding=NamedSharding(over, spec)
        )

    q, k = abstract(HEADS, "heads"), abstract(KV_HEADS, "kv_heads")
    traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(q, k, k, q)
    return traced.lower(lowering_platforms=("tpu",)).compile()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--out", type=Path, help="JSON file")
    flags = parser.parse_args()
    known = (
        json.loads(flags.out.read_text())
        if flags.out and flags.out.exists()
        else {"cases": {}}
    )
    record = known | measuring.record_head(sys.argv[1:])
    for case in flags.cases:
        if case in record["cases"]:
            continue
        form, *sizes = case.split(":")
        start = time.process_time()
        memory = compiled(form, *map(int, sizes)).memory_analysis()
        seconds = round(time.process_time() - start, 1)
        record["cases"][case] = {
            "temp_bytes": memory.temp_size_in_bytes,
            "cpu_seconds": seconds,
        }
        print(
            f"{case}: temporary {memory.temp_size_in_bytes / 1e6:,.1f} MB, {seconds} CPU s",
            flush=True,
        )
        measuring.write(flags.out, record)
    print(table(record["cases"]))


def table(cases: dict[str, dict]) -> str:
    """Returns the table of the docs: a row for each form and number of tokens
    a device.
    """
    lines = []
    for form in SIZES:
        for own in sorted(
            {int(s) // int(c) for f, s, c in (x.split(":") for x in cases) if f == form}
        ):
            row = [cases.get(f"{form}:{own * c}:{c}") for c in TARGETS]
            cells = [
                f"{found['temp_bytes'] / 1e6:,.1f}" if found else "" for found in row
            ]
            lines.append(f"| `{form}` | {own:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
