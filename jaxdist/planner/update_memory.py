"""The memory that the update of a step needs besides state and gradients.

The lifetimes were read from buffer assignments of XLA for CUDA (jax 0.10.2).
"""

import math

from jaxdist.optim.roles import role_of
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.dim_names import in_stack
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer.run_config import RunConfig

# Share of the new parameters that wait in memory of their own, after a gather, by
# platform. On GPUs it was 0.45 to 0.96 in six programs at ZeRO 2
# (benchmarks/plan/arithmetic.py). With a larger share, a search would refuse layouts
# that fit (`memory.OVERESTIMATE`).
WAITING = {"gpu": 0.6, "tpu": 1.0}


def gathered_bytes(
    spec: ModelSpec,
    rules: Rules,
    itemsize: int,
    platform: str,
    *,
    layers: int = 0,
) -> int:
    """Counts the gathered parameters that wait to be put in place, in bytes.

    At ZeRO 1 and 2, each device updates its shards, and gathers the new parameters. XLA
    starts the gathers of all parameters before it puts the first in place. On GPUs,
    some results use the memory of old parameters that nobody reads any more; the order
    of the instructions decides which. After an update that goes layer by layer
    (`step.layerwise`), gathers of stacks take the memory of the old parameters. Beside
    them are one layer, or one other parameter.

    Args:
      spec: the model.
      rules: the sharding rules of the layout.
      itemsize: bytes of a stored number.
      platform: tpu, gpu or cpu.
      layers: number of layers on a device if the update goes layer by layer, or 0.
    """
    sizes = {
        path: math.prod(rules.shard_dims(rules.stored(names, x.shape), x.shape))
        for path, (x, names) in spec.named_trainable().items()
        if rules.state(names, x.shape) != rules.stored(names, x.shape)
    }
    if layers:
        in_layers = sum(size for path, size in sizes.items() if in_stack(path))
        others = [size for path, size in sizes.items() if not in_stack(path)]
        return itemsize * max([in_layers // layers, *others])
    whole = sum(sizes.values())
    return int(WAITING.get(platform, 0) * itemsize * whole)


def orthogonalized_bytes(spec: ModelSpec, rules: Rules, run: RunConfig) -> int:
    """Counts the matrices that Muon orthogonalizes on a device, in bytes.

    Each device gets its share of the matrices of each stack, in float32, and writes the
    results beside them (`Execution.map_matrices`). XLA may do so for all stacks at once.
    """
    if run.optimizer.name != "muon":
        return 0
    numbers = 0
    for path, (x, names) in spec.named_trainable().items():
        role = role_of(path.split("/"), x.shape, names)
        if role.kind != "matrix":
            continue
        *_, divided = rules.way_to_whole_matrices(names, x.shape, role.dims)
        parts = rules.parts(divided)
        numbers += math.prod(
            -(-dim // part) for dim, part in zip(x.shape, parts, strict=True)
        )
    return 2 * 4 * numbers
