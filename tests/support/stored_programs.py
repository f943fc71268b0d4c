"""The programs in tests/hlo: what each was compiled for, and its collectives."""

from jaxdist.parallel.axes import AXES
from jaxdist.parallel.mesh import MeshShape
from jaxdist.planner import communication, targets
from jaxdist.telemetry import hlo
from support.paths import HLO


def mesh_shape(dcn=None, **sizes):
    return MeshShape({a: sizes.get(a, 1) for a in AXES}, {a: (dcn or {}).get(a, 1) for a in AXES})


CASES = {  # golden text -> target, mesh
    "v5e_fsdp256": ("v5e:16x16", mesh_shape(fsdp=256)),
    "v5p_tensor4": ("v5p:4x4x4", mesh_shape(fsdp=16, tensor=4)),
    # llama3_8b with 4 layers: gathers and sums on the SparseCore, as two versions of libtpu write them.
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
