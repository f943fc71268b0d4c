"""Adapters as PEFT files: adapter_config.json and adapter_model.safetensors.

A family's table says which of our kernels a linear layer of theirs is. Where several
are one (GPT-2's c_attn), so are their adapters: A's rows are put together and B is
block diagonal, of as many times the rank. The other way round, the one A that such a
layer has by itself goes to each of our kernels. Source: files and code of peft 0.21.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from jaxdist.config import ConfigError
from jaxdist.interop.families import Family, Shapes, Stored, TensorPart
from jaxdist.interop.hf_reader import all_finite, open_tensors
from jaxdist.models.lora import LoraConfig
from jaxdist.storage.untrusted import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_SHOWN = 12
_ALPHA = 8  # PEFT's default
# Fields of adapter_config.json that change what an adapter does, with the values that
# ours have.
_REQUIRED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    # Other ways to begin change the model as well (pissa, olora, corda, loftq).
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
_WRITTEN = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "use_rslora": False,
    "use_dora": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "layers_pattern": None,
}


def write(
    target: Path,
    family: Family,
    config: LoraConfig,
    adapters: Mapping[str, np.ndarray],
    shapes: Shapes,
    *,
    base: str,
) -> int:
    """Writes a folder for `PeftModel.from_pretrained`; returns the bytes of its
    tensors.

    Args:
      adapters: our A and B by path, "blocks/attention/query/lora_a" [L, D, rank].
      shapes: of the model's parameters without adapters.
      base: where the model lies that they adapt, for people and PEFT to find it.

    Raises:
      ConfigError: the family has no tensor for a kernel.
    """
    unmapped = {path.rpartition("/")[0] for path in adapters}
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    for stored in family.present(shapes):
        parts = [part for part in stored.parts if f"{part.path}/lora_a" in adapters]
        unmapped -= {part.path for part in parts}
        for layer in range(shapes[parts[0].path][0] if parts else 0):
            name = stored.name_of(layer).removesuffix(".weight")
            ranks[re.split(r"\.\d+\.", name)[1]] = len(parts) * config.rank
            a, b = _fused(stored, parts, adapters, shapes, layer)
            tensors |= {
                f"{_PREFIX}{name}.lora_A.weight": a,
                f"{_PREFIX}{name}.lora_B.weight": b,
            }
    if unmapped:
        raise ConfigError(
            f"{family.model_type} has no tensor for adapters of {', '.join(sorted(unmapped))}"
        )
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    wide = {name: rank for name, rank in ranks.items() if rank != config.rank}
    fields = _WRITTEN | {
        "base_model_name_or_path": base or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": wide,
        "alpha_pattern": {
            name: config.alpha * rank / config.rank for name, rank in wide.items()
        },
        "fan_in_fan_out": family.model_type == "gpt2",
    }
    (target / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return sum(x.nbytes for x in tensors.values())


def read(
    folder: Path | str, family: Family, config: LoraConfig, shapes: Shapes
) -> dict[str, np.ndarray]:
    """Returns our A and B by path, as float32, from a folder that PEFT or `write`
    wrote.

    Targets that the folder does not adapt keep A = B = 0.

    Args:
      shapes: of our A and B, by path.

    Raises:
      ConfigError: it is no such folder; it adapts more, or otherwise, than `config`
        says.
    """
    folder = Path(folder).expanduser()
    try:
        fields = read_json(folder / CONFIG, dict)
        with open_tensors(folder / WEIGHTS) as file:
            tensors = {
                name.removeprefix(_PREFIX): file.get_tensor(name) for name in file
            }
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"lora.from_peft={folder}: no adapter that PEFT wrote: {error}"
        ) from error
    faults = [
        f"{name}={fields[name]!r} is not supported; required {legal[0]!r}"
        for name, legal in _REQUIRED.items()
        if fields.get(name, legal[0]) not in legal
    ] + _scale_faults(fields)
    faults += [
        f"{name} has NaN or infinite values"
        for name, x in tensors.items()
        if not all_finite(x)
    ]
    adapters = {path: np.zeros(dims, np.float32) for path, dims in shapes.items()}
    for name in () if faults else tensors:
        faults += _take(adapters, name, tensors, family, fields, config)
    if faults:
        shown = list(dict.fromkeys(faults))[:_SHOWN]
        raise ConfigError(f"lora.from_peft={folder}: {fault}" for fault in shown)
    return adapters


def _scale_faults(fields: Mapping[str, Any]) -> list[str]:
    """Lists what is wrong with the fields that say how strong an adapter is."""
    alphas = {"lora_alpha": fields.get("lora_alpha", _ALPHA)}
    patterns = fields.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        return [f"alpha_pattern={patterns!r:.40}: a mapping is required"]
    faults = [
        f"alpha_pattern has {key!r:.40}, no plain name"
        for key in patterns
        if not _is_plain(key)
    ]
    return faults + [
        f"{name}={alpha!r:.40}: a number is required"
        for name, alpha in (alphas | patterns).items()
        if type(alpha) not in (int, float) or not math.isfinite(alpha)
    ]


def _is_plain(pattern: str) -> bool:
    """Checks whether a regex of others is one that ends soon: it repeats nothing."""
    try:
        return bool(
            re.fullmatch(r"[\w.|()\\^$\[\]-]{1,200}", pattern)
            and re.compile(f"({pattern})")
        )
    except re.error:
        return False


def _take(adapters, name, tensors, family, fields, config) -> Iterator[str]:
    """Fills in what one A of theirs, with its B, gives of ours; yields what is wrong
    with it.
    """
    module, is_a, _ = name.partition(".lora_A.weight")
    if not is_a:
        if not name.endswith(".lora_B.weight"):
            yield f"the tensor {name} is not understood"
        return
    layer = re.search(r"\.(\d{1,9})\.", module)
    canonical = family.canonical(f"{module}.weight")
    number = int(layer[1]) if layer else 0
    of_layers = (stored for stored in family.tensors if stored.parts[0].stacked == 1)
    stored = next((s for s in of_layers if s.name.format(number) == canonical), None)
    if stored is None:
        yield f"{module} has an adapter, and no kernel of ours is that layer of {family.model_type}"
        return
    if "blocks/layer_0/" in "".join(adapters) or "first_blocks/" in "".join(adapters):
        yield "adapters of a model with dense layers between those with experts are not read"
        return
    untargeted = [
        part.path for part in stored.parts if f"{part.path}/lora_a" not in adapters
    ]
    if untargeted:
        yield f"{module} has an adapter, and {untargeted[0]} is no target; name it in lora.targets"
        return
    a = tensors[name]
    b = tensors.get(f"{module}.lora_B.weight")
    if b is None or (misfit := _misfit(stored, adapters, number, a, b)):
        yield f"{module} {'has no lora_B' if b is None else misfit}"
        return
    rank = a.shape[0]
    scale = _scale(fields, module, rank)
    expected = config.alpha / config.rank
    pieces = _split(stored, adapters, a, b, config.rank)
    if pieces is None:
        yield f"{module} has rank {rank}, lora.rank is {config.rank}; set lora.rank={rank}"
    elif not math.isclose(scale, expected, rel_tol=1e-6):
        yield (
            f"{module} has alpha / rank = {scale:.6g}, lora.alpha={config.alpha:g} makes it "
            f"{expected:.6g}; set lora.alpha={scale * config.rank:g}"
        )
    else:
        for path, value in pieces.items():
            adapters[path][number] = value


def _misfit(stored: Stored, ours, number: int, a: np.ndarray, b: np.ndarray) -> str:
    """Explains why A and B of a layer of theirs are none of ours, whatever their rank;
    "" if they are.
    """
    if a.ndim != 2 or b.ndim != 2 or not 0 < a.shape[0] == b.shape[1]:
        return f"has lora_A {a.shape} and lora_B {b.shape}; required [rank, in] and [out, rank]"
    dims = [
        (ours[f"{part.path}/lora_a"].shape, ours[f"{part.path}/lora_b"].shape)
        for part in stored.parts
    ]
    sizes = math.prod(dims[0][0][1:-1]), sum(math.prod(of_b[2:]) for _, of_b in dims)
    if number >= dims[0][0][0] or sizes != (a.shape[1], b.shape[0]):
        return f"maps {a.shape[1]} values to {b.shape[0]}; {dims[0][0][0]} layers of {sizes} are required"
    return ""


def _scale(fields: Mapping[str, Any], module: str, rank: int) -> float:
    """Returns the factor of A B in a module of theirs."""
    patterns = fields.get("alpha_pattern") or {}
    matching = (
        alpha
        for key, alpha in patterns.items()
        if re.fullmatch(rf"(.*\.)?({key})", module)
    )
    alpha = next(matching, fields.get("lora_alpha", _ALPHA))
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


# --- a layer of theirs and kernels of ours --------------------------------------------


def _fused(
    stored: Stored, parts: list[TensorPart], adapters, shapes, layer: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns PEFT's A [ranks, in] and B [out, ranks] of a layer of theirs, adapted in
    some of its parts.
    """
    rows = [adapters[f"{part.path}/lora_a"][layer] for part in parts]
    rank = rows[0].shape[-1]
    # the same for all parts, so the rest of a kernel's dims are outputs
    inputs = rows[0].size // rank
    ends = np.cumsum(
        [math.prod(shapes[part.path][1:]) // inputs for part in stored.parts]
    )
    b = np.zeros((ends[-1], rank * len(parts)), np.float32)
    for number, part in enumerate(parts):
        end = ends[stored.parts.index(part)]
        block = adapters[f"{part.path}/lora_b"][layer].reshape(rank, -1).T
        b[end - len(block) : end, rank * number : rank * (number + 1)] = block
    a = np.concatenate(
        [np.asarray(row, np.float32).reshape(-1, rank).T for row in rows]
    )
    return np.ascontiguousarray(a), b


def _split(
    stored: Stored, ours, a: np.ndarray, b: np.ndarray, rank: int
) -> dict[str, np.ndarray] | None:
    """Returns A and B of our kernels from those of a layer of theirs; None: the rank
    does not fit.
    """
    count = len(stored.parts)
    kernels = {}
    row = 0
    # as `_fused` put them together, if nothing is off the diagonal
    blocks = a.shape[0] == rank * count
    if not blocks and a.shape[0] != rank:
        return None
    for number, part in enumerate(stored.parts):
        paths = f"{part.path}/lora_a", f"{part.path}/lora_b"
        dims = [ours[path].shape[1:] for path in paths]
        columns = slice(rank * number, rank * (number + 1)) if blocks else slice(None)
        size = math.prod(dims[1][1:])
        mine = b[row : row + size]
        row += size
        if blocks and np.delete(mine, np.r_[columns], axis=1).any():
            return None
        kernels[paths[0]] = a[columns].T.reshape(dims[0]).astype(np.float32)
        kernels[paths[1]] = mine[:, columns].T.reshape(dims[1]).astype(np.float32)
    return kernels
