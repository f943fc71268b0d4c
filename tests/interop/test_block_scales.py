"""Folders of weights in 8-bit floats with a scale for each block (fp8)."""

import json
import math
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxdist import interop
from jaxdist.config import ConfigError, exit_code_of
from jaxdist.interop import block_scales
from jaxdist.interop.hf_reader import SINGLE
from jaxdist.interop.tensor_files import slices_of
from support.huggingface import FOLDERS, load_all, opened, run_convert

FORMAT = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCK = (8, 6)  # 24 x 16 and 16 x 16 have blocks that are cut


def coded(x, block):
    """Returns codes and scales of a matrix; the largest code of a block is 448."""
    rows, columns = (-(-n // size) for n, size in zip(x.shape, block, strict=True))
    scales = np.empty((rows, columns), np.float32)
    codes = np.empty(x.shape, ml_dtypes.float8_e4m3fn)
    for i in range(rows):
        for j in range(columns):
            place = np.s_[
                i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]
            ]
            scales[i, j] = np.abs(x[place]).max() / 448
            codes[place] = (x[place] / scales[i, j]).astype(codes.dtype)
    return codes, scales


def values_of(codes, scales, block):
    """Multiplies with the scale of each value, all at once."""
    rows, columns = codes.shape
    each = np.repeat(np.repeat(scales, block[0], 0)[:rows], block[1], 1)[:, :columns]
    return codes.astype(np.float32) * each.astype(np.float32)


def quantised(folder, target, block=BLOCK):
    """Writes the folder with its layers' matrices in fp8; returns all tensors written,
    and the values that they stand for.
    """
    shutil.copytree(folder, target)
    stored, values = {}, load_all(folder)
    for name, x in values.items():
        stored[name] = x
        if x.ndim == 2 and ".layers." in name:
            codes, scales = coded(x.astype(np.float32), block)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            values[name] = values_of(codes, scales, block)
    for file in target.glob("*.safetensors*"):
        file.unlink()
    save_file(stored, target / SINGLE)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] = FORMAT | {"weight_block_size": list(block)}
    (target / "config.json").write_text(json.dumps(config))
    return stored, values


@pytest.fixture(name="fp8", scope="module")
def fp8_fixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fp8") / "mistral"
    stored, values = quantised(FOLDERS / "mistral", folder)
    coded_names = [name for name in stored if name.endswith("_scale_inv")]
    assert len(coded_names) == 3 * 7
    sizes = {x.shape for name, x in values.items() if f"{name}_scale_inv" in stored}
    assert any(n % size for dims in sizes for n, size in zip(dims, BLOCK, strict=True))
    return folder, stored, values


def exported(parameters, folder, target, dtype="float32"):
    config = interop.read_config(folder)
    family, fields = interop.fields_of(interop.derive(config)[1], config)
    shapes = {path: x.shape for path, x in parameters.items()}
    interop.export(
        target,
        family,
        fields,
        shapes,
        lambda path: np.asarray(parameters[path]),
        dtype=dtype,
        max_shard_bytes=10**9,
    )
    return load_all(target)


def test_values_are_codes_times_the_scales_of_their_blocks(fp8, tmp_path):
    folder, _, values = fp8
    at = opened(folder)
    parameters = at.tensors.load(at.wanted)
    written = exported(parameters, folder, tmp_path)
    assert written.keys() == values.keys()
    original = load_all(FOLDERS / "mistral")
    name = "model.layers.1.mlp.down_proj.weight"
    assert 0 < np.abs(written[name] - original[name]).max() < 0.05
    for name, x in values.items():
        assert written[name].tobytes() == x.tobytes(), name
    assert "quantization_config" not in interop.read_config(tmp_path)


def test_shards_have_the_values_of_the_whole(fp8):
    """Devices hold ranges of rows and columns that begin inside of blocks."""
    folder, _, _ = fp8
    at = opened(folder)
    whole = at.tensors.load(at.wanted)
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    cuts = {
        "blocks/mlp/up": jax.P(None, "a", "b"),
        "blocks/mlp/down": jax.P(None, "b", "a"),
        "blocks/attention/query": jax.P(None, "b", None, "a"),
    }
    for path, cut in cuts.items():
        where = jax.sharding.NamedSharding(mesh, cut)
        x = whole[path]
        part = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)
        at.tensors.bytes_read = 0
        found = at.tensors.load(at.wanted | {path: part})[path]
        assert not found.sharding.is_fully_replicated
        np.testing.assert_array_equal(found, x)
        assert at.tensors.bytes_read == sum(x.nbytes for x in whole.values())


class Noted:
    """A slice that notes what is read of it."""

    def __init__(self, values):
        self.values, self.read = values, []

    def get_shape(self):
        return list(self.values.shape)

    def __getitem__(self, index):
        self.read.append(index)
        return self.values[index]


def test_a_part_reads_the_scales_of_its_blocks_alone():
    block = (128, 128)
    x = np.random.default_rng(0).normal(size=(576, 300)).astype(np.float32)
    codes, scales = coded(x, block)
    assert scales.shape == (5, 3)
    every = values_of(codes, scales, block)
    noted = Noted(codes), Noted(scales)
    weight = block_scales.BlockScaled(*noted, block)
    parts = [
        (np.s_[0:576, 0:300], np.s_[0:5, 0:3]),
        (np.s_[100:130, 256:300], np.s_[0:2, 2:3]),
        (np.s_[512:576, 1:2], np.s_[4:5, 0:1]),
        (np.s_[128:256, 127:129], np.s_[1:2, 0:2]),
    ]
    for part, blocks in parts:
        np.testing.assert_array_equal(weight[part], every[part])
        assert (noted[0].read.pop(), noted[1].read.pop()) == (part, blocks)


def test_eight_bit_floats_are_mapped_from_files_of_many_tensors(tmp_path):
    tensors = {
        "a": np.arange(7, dtype=np.float32),
        "codes": np.linspace(-9, 9, 15).reshape(3, 5).astype(ml_dtypes.float8_e4m3fn),
        "z": np.ones((2, 2), ml_dtypes.bfloat16),
    }
    save_file(tensors, tmp_path / SINGLE)
    found = slices_of(tmp_path / SINGLE)
    assert found["codes"].get_dtype() == "F8_E4M3"
    for name, x in tensors.items():
        assert tuple(found[name].get_shape()) == x.shape
        every = tuple(slice(0, n) for n in x.shape)
        assert found[name][every].tobytes() == x.tobytes()
    assert found["codes"][1:2, 3:5].tobytes() == tensors["codes"][1:2, 3:5].tobytes()


# --- folders that are not right -------------------------------------------------------

NAME = "model.layers.1.mlp.down_proj.weight"


def changed(fp8, target, tensors=None, **fields):
    """Copies the folder with other tensors (None: left out) and fields of its format."""
    folder, stored, _ = fp8
    shutil.copytree(folder, target)
    kept = {k: x for k, x in (stored | (tensors or {})).items() if x is not None}
    save_file(kept, target / SINGLE)
    config = json.loads((target / "config.json").read_text())
    config["quantization_config"] |= fields
    (target / "config.json").write_text(json.dumps(config))
    return target


SCALES = f"{NAME}_scale_inv"
BAD = {
    "missing": ({SCALES: None}, {}, f"its scales are missing: {SCALES}"),
    "shape": (
        {SCALES: np.ones((1, 1), np.float32)},
        {},
        f"{SCALES} has shape (1, 1); blocks of 8 x 6 of (16, 24) need (2, 4)",
    ),
    "dtype": (
        {SCALES: np.ones((2, 4), np.float16)},
        {},
        f"{SCALES} is F16; required F32",
    ),
    "not codes": (
        {NAME: np.ones((16, 24), np.float32)},
        {},
        f"unexpected tensors: {SCALES}",
    ),
    "format": ({}, {"fmt": "e5m2"}, "fmt='e5m2': not supported; required 'e4m3'"),
    "block": (
        {},
        {"weight_block_size": [128]},
        "weight_block_size=[128]: two whole numbers > 0 are required",
    ),
    "no block": ({}, {"weight_block_size": None}, "weight_block_size=None: two whole"),
    "method": ({}, {"quant_method": "awq"}, "this field is not understood"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_right_is_one_line(name, fp8, tmp_path):
    tensors, fields, text = BAD[name]
    folder = changed(fp8, tmp_path / "folder", tensors, **fields)
    with pytest.raises(ConfigError) as raised:
        run_convert(folder, tmp_path / "work", "jaxdist")
    (said,) = raised.value.faults
    assert text in said
    assert exit_code_of(raised.value) == 78
    assert not (tmp_path / "work").exists()


def test_codes_without_a_format_are_refused(fp8, tmp_path):
    folder = changed(fp8, tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="down_proj.weight is F8_E4M3; required F32"):
        opened(folder)


def test_nan_codes_are_named(fp8, tmp_path):
    codes = fp8[1][NAME].copy()
    codes[3, 5] = np.nan
    assert math.isnan(codes[3, 5])
    at = opened(changed(fp8, tmp_path / "folder", {NAME: codes}))
    with pytest.raises(ConfigError, match=f"NaN or infinite values: {NAME};"):
        at.tensors.load(at.wanted)


def test_the_command_reads_them(fp8, tmp_path):
    folder, _, values = fp8
    assert run_convert(folder, tmp_path / "work", "jaxdist") == 0
    assert run_convert(tmp_path / "work", tmp_path / "out", "huggingface") == 0
    written = load_all(tmp_path / "out")
    assert all(written[name].tobytes() == x.tobytes() for name, x in values.items())
    assert not interop.read_config(tmp_path / "out").get("quantization_config")
