"""One of several processes that read a Hugging Face folder; prints what it read and
held, as JSON.

python tests/support/read_huggingface.py FOLDER fsdp=4
"""

import json
import sys
import tracemalloc

import jax

from jaxdist import interop
from jaxdist.distributed import initialize
from jaxdist.trainer import initial_weights, run_config, validation
from jaxdist.trainer.weight_source import Target


def main(folder: str, mesh: str) -> None:
    initialize.prepare()
    config = run_config.default_config()
    own = {
        "init.from_huggingface": folder,
        "data.source": "bin",
        "data.path": "none",
        "batch.global_size": 8,
    }
    sizes = {
        f"mesh.{axis}": int(size)
        for axis, _, size in (part.partition("=") for part in mesh.split(","))
    }
    config.update_from_flattened_dict(own | sizes)
    sources = initial_weights.chosen_sources(config, interop.WEIGHT_SOURCES)
    initial_weights.apply_config(config, sources)
    run = run_config.from_config(config)
    composition = validation.validate(run, jax.devices(), with_data=False)
    built = composition.build_step(jax.devices())
    wanted = Target(run, built.views.abstract).parameters
    tensors = interop.open_weights(
        folder, run.model_options, {p: x.shape for p, x in wanted.items()}
    )
    tracemalloc.start()
    loaded = tensors.load(wanted)
    peak = tracemalloc.get_traced_memory()[1]
    distinct = [
        {str(s.index): s.data.nbytes for s in x.addressable_shards}
        for x in loaded.values()
    ]
    sums = jax.jit(lambda leaves: sum((leaf**2).sum() for leaf in leaves))(
        list(loaded.values())
    )
    about = {
        "process": jax.process_index(),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "read": tensors.bytes_read,
        "share": sum(sum(shards.values()) for shards in distinct),
        "peak": peak,
        "largest_tensor": max(
            x.nbytes // (3 if "blocks" in path else 1) for path, x in loaded.items()
        ),
        "sum": float(sums),
    }
    print(json.dumps(about), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
