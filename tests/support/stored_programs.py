"""The programs in tests/hlo: what each was compiled for, and its collectives."""

from dataclasses import replace

from jaxdist.config import files
from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshConfig, MeshShape
from jaxdist.planner import communication, plan, targets
from jaxdist.planner.calibration import Calibration
from jaxdist.planner.compiled_step import with_compiled
from jaxdist.planner.compiler import Compiled
from jaxdist.planner.document import Plan
from jaxdist.telemetry import hlo
from jaxdist.trainer import run_config
from support.paths import CONFIGS, HLO


def mesh_shape(dcn=None, **sizes):
    return MeshShape(
        {a: sizes.get(a, 1) for a in AXES}, {a: (dcn or {}).get(a, 1) for a in AXES}
    )


CASES = {  # golden text -> target, mesh
    "v5e_fsdp256": ("v5e:16x16", mesh_shape(fsdp=256)),
    "v5p_tensor4": ("v5p:4x4x4", mesh_shape(fsdp=16, tensor=4)),
    # llama3_8b with 4 layers: gathers and sums on the SparseCore, as two versions of
    # libtpu write them.
    "v5p_sparse_core_42": ("v5p:4x4x4", mesh_shape(fsdp=64)),
    "v5p_sparse_core_50": ("v5p:4x4x4", mesh_shape(fsdp=64)),
    "v5e_two_slices": ("v5e:4x4x2", mesh_shape({"data": 2}, data=2, fsdp=16)),
    "h100_4x8": ("h100:4x8", mesh_shape(data=2, fsdp=4, tensor=4)),
}


def read(name):
    text, shape = CASES[name]
    target = targets.parse(text)
    ids = target.arrange(shape).ravel().tolist()
    module = hlo.parse((HLO / f"{name}.txt").read_text())
    found = communication.collectives(module, shape, target, ids)
    assert found
    return {one.name: one for one in found}


def planned(name: str, measured: Calibration | None = None) -> Plan:
    """Returns the plan of a stored program, as if a run on its target had compiled to
    it.
    """
    text, shape = CASES[name]
    target, run = (
        targets.parse(text),
        run_config.from_config(files.load("dense_16b:tiny", folders=[CONFIGS])),
    )
    config, batch = (
        MeshConfig(**{"data": 1} | dict(shape.sizes)),
        replace(run.batch, global_size=64),
    )
    run = replace(
        run,
        mesh=config,
        batch=batch,
        precision=replace(run.precision, compute="bfloat16"),
    )
    sizes = dict.fromkeys(
        ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes"), 0
    )
    ids = tuple(target.arrange(shape).ravel().tolist())
    program = (HLO / f"{name}.txt").read_text()
    compiled = Compiled(
        **sizes, host_argument_bytes=0, host_temp_bytes=0, hlo=program, mesh_ids=ids
    )
    by_arithmetic = plan.plan_by_arithmetic(run, target)
    return with_compiled(replace(by_arithmetic, calibration=measured), compiled)
