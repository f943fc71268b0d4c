"""Modules of jaxdist that are imported where they are used, and the reasons.

Every other import of a jaxdist module is an import statement at the top of a module. A
module is listed here if it needs an optional package, or if it makes the start of
`train` measurably longer. `extras.load` imports these modules and no others.
`tests/test_architecture.py` reads the list.

Two places import modules by name without a row here. The exports of
`jaxdist/__init__.py` do, so that `import jaxdist` loads nothing else. The commands of
`jaxdist/__main__.py` do, because each process runs only one of them.

The milliseconds are medians of three runs of `python -X importtime -c "import
jaxdist.train; import MODULE"` on a CPU with bytecode cached. `import jaxdist.train`
alone takes 1,500 to 2,400 ms on the same machine.
"""

from typing import Literal, NamedTuple


class LateImport(NamedTuple):
    """Reason why a module is imported late."""

    why: Literal["optional", "slow"]
    package: str  # the package whose import is delayed; in extras.EXTRAS if optional
    milliseconds: int  # time that the import would add to the start of `train`


LATE_IMPORTS = {
    # added to `checkpoint list`, which needs it only for runs with steps in memory
    "jaxdist.checkpoint.memory_list": LateImport("slow", "numpy", 175),
    "jaxdist.checkpoint.orbax_backend": LateImport("slow", "orbax", 218),
    "jaxdist.data.bpe": LateImport("optional", "tokenizers", 17),
    "jaxdist.data.chat_renderer": LateImport("optional", "jinja2", 27),
    "jaxdist.data.sources.digits": LateImport("optional", "sklearn", 1123),
    "jaxdist.data.sources.huggingface": LateImport("optional", "datasets", 880),
    "jaxdist.data.sources.parquet": LateImport("optional", "pyarrow", 48),
    "jaxdist.evaluation.lm_eval": LateImport("optional", "lm_eval", 1015),
    "jaxdist.models.lora_quantization": LateImport("optional", "qwix", 33),
    "jaxdist.operations.metrics.tpu_metrics": LateImport("optional", "libtpu", 43),
    "jaxdist.ops.experts.tpu": LateImport("slow", "jax.experimental.pallas", 67),
    "jaxdist.ops.splash": LateImport("slow", "jax.experimental.pallas", 89),
    "jaxdist.planner.dry_run": LateImport("slow", "jaxdist.planner", 30),
    "jaxdist.planner.fit_remat": LateImport("slow", "jaxdist.planner", 95),
    "jaxdist.planner.plan": LateImport("slow", "jaxdist.planner", 58),
    "jaxdist.telemetry.loggers.tensorboard": LateImport("optional", "tensorboardX", 81),
    "jaxdist.telemetry.loggers.trackio": LateImport("optional", "trackio", 321),
    "jaxdist.telemetry.loggers.wandb": LateImport("optional", "wandb", 358),
}
