"""A folder read by several processes: each reads its own shards, in little memory."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxdist import interop
from support.paths import SUPPORT
from support.runs import start_group

SHAPE = {
    "num_layers": 3,
    "d_model": 256,
    "d_ff": 768,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 32,
}
SPARSE = {"num_experts": 8, "experts_per_token": 2, "expert_d_ff": 96, "norm_eps": 1e-5}
PROGRAM = SUPPORT / "read_huggingface.py"


def write_folder(folder: Path, sparse: bool = False) -> int:
    """Writes a random Llama or Mixtral of 12 MB in several files; returns the bytes."""
    more = {"vocab_size": 1024, "tie_embeddings": False} | (SPARSE if sparse else {})
    values = interop.canonical_values(SHAPE | more)
    family, fields = interop.fields_of(values)
    d, f, v, kv, n = 256, 768, 1024, 4, 32
    blocks = {
        "attention_norm/scale": (d,),
        "mlp_norm/scale": (d,),
        "attention/query": (d, 8, n),
        "attention/key": (d, kv, n),
        "attention/value": (d, kv, n),
        "attention/out": (8, n, d),
        "mlp/gate": (d, f),
        "mlp/up": (d, f),
        "mlp/down": (f, d),
    }
    if sparse:
        e, f = 8, 96
        kernels = {"mlp/gate": (e, d, f), "mlp/up": (e, d, f), "mlp/down": (e, f, d)}
        blocks |= {"mlp/router": (d, e)} | kernels
    shapes = {"embedding": (v, d), "final_norm/scale": (d,), "output": (d, v)}
    shapes |= {f"blocks/{path}": (3, *dims) for path, dims in blocks.items()}
    draw = np.random.default_rng(0)
    return interop.export(
        folder,
        family,
        fields,
        shapes,
        lambda path: draw.standard_normal(shapes[path], np.float32),
        dtype="float32",
        max_shard_bytes=3_000_000,
    )


def read_together(
    folder: Path, processes: int, devices_each: int, mesh: str
) -> list[dict]:
    """Returns the report of each process about its reading."""
    command = [sys.executable, str(PROGRAM), str(folder), mesh]
    started = start_group(command, processes, devices_each)
    said = [process.communicate()[0] for process in started]
    assert all(process.returncode == 0 for process in started)
    # Gloo prints lines of its own, and its last one may lack its end.
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(text, text.index("{"))[0] for text in said]


@pytest.mark.slow
def test_two_processes_each_read_their_share(tmp_path):
    """fsdp 4 over two processes: each reads half, and a copy of the norms."""
    total = write_folder(tmp_path)
    assert total > 10_000_000
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = read_together(tmp_path, 2, 2, "fsdp=4")
    assert sorted(one["process"] for one in found) == [0, 1]
    for one in found:
        assert one["processes"] == 2
        assert one["devices"] == 4
        assert total / 2 <= one["share"] <= 1.02 * total / 2
        assert one["read"] == pytest.approx(one["share"], rel=0.02)
        # On CPU the arrays are the host's memory: all of the peak but a piece of one
        # tensor.
        assert one["share"] <= one["peak"] <= one["share"] + one["largest_tensor"]
    assert found[0]["sum"] == pytest.approx(found[1]["sum"], rel=1e-5)


@pytest.mark.slow
def test_two_processes_each_read_their_experts(tmp_path):
    """Expert 2 over the processes: each reads half of all but the norms, once."""
    total = write_folder(tmp_path, sparse=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mixtral"
    found = read_together(tmp_path, 2, 4, "expert=2,fsdp=2,tensor=2")
    for one in found:
        assert one["processes"] == 2
        assert one["devices"] == 8
        assert total / 2 <= one["share"] <= 1.02 * total / 2
        assert one["read"] == pytest.approx(one["share"], rel=0.001)
    assert found[0]["sum"] == pytest.approx(found[1]["sum"], rel=1e-5)


@pytest.mark.slow
def test_replicas_are_read_once_by_each_process(tmp_path):
    """Data 2 over the processes: each reads all, and its devices half each."""
    total = write_folder(tmp_path)
    for one in read_together(tmp_path, 2, 2, "data=2,tensor=2"):
        assert one["read"] == pytest.approx(total, rel=0.02)
        assert one["share"] == pytest.approx(total, rel=0.02)
