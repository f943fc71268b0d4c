"""Reads and writes LoRA adapters as PEFT files.

The files are adapter_config.json and adapter_model.safetensors. A family's table says
which kernels a linear layer of Hugging Face's model holds. Some layers hold several
(GPT-2's c_attn holds query, key and value). To write the adapters of these kernels as one
adapter, A's rows are joined and B is block diagonal, so the rank is multiplied. To read
an adapter that PEFT trained for such a layer, its A is copied to each kernel. Source:
files and code of peft 0.21.
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
from jaxdist.config.patterns import is_whole, pattern_faults
from jaxdist.interop.families import Family, Shapes, Stored, TensorPart
from jaxdist.interop.tensor_files import all_finite, open_tensors
from jaxdist.models.lora import LoraConfig, is_factor
from jaxdist.storage.untrusted import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MODULE_ENDS = r"(.*\.)?({})"  # pattern of modules whose name ends with a pattern
_SHOWN = 12  # faults that a message lists
_DEFAULT_ALPHA = 8  # PEFT's default
# Fields of adapter_config.json that change an adapter's effect, with supported values;
# the first one is the default.
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "use_dora": (False,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
    # Other initializations change the base model as well (pissa, olora, corda, loftq).
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}
# the adapter's array of each parameter path, "blocks/attention/query/lora_a"
Adapters = Mapping[str, np.ndarray]

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
    adapters: Adapters,
    shapes: Shapes,
    *,
    base: str,
) -> int:
    """Writes a folder for `PeftModel.from_pretrained`.

    Args:
      target: the folder to write.
      family: the base model's architecture.
      config: rank, alpha and dropout of the adapters.
      adapters: A and B of all layers by path, "blocks/attention/query/lora_a"
        [L, D, rank]; and kernels that are trained in full beside them, "score" [D, 1].
      shapes: the shapes of the base model's parameters, by path.
      base: folder of the base model, by which PEFT finds it; "" = unknown.

    Returns:
      The number of bytes of the tensors.

    Raises:
      ConfigError: the family has no tensor for a kernel.
    """
    in_full = {path: x for path, x in adapters.items() if not is_factor(path)}
    adapters = {path: x for path, x in adapters.items() if is_factor(path)}
    unmapped = {path.rpartition("/")[0] for path in adapters} | in_full.keys()
    tensors: dict[str, np.ndarray] = {}
    saved_modules: list[str] = []  # trained in full
    ranks: dict[str, int] = {}  # of each module's adapters, by the module's name
    for stored in family.present(shapes):
        path = stored.parts[0].path
        if path in in_full:
            unmapped.discard(path)
            saved_modules.append(stored.name.removesuffix(".weight"))
            kernel = np.asarray(in_full[path], np.float32)
            tensors[_PREFIX + stored.name] = np.ascontiguousarray(kernel.T)
            continue
        parts = [part for part in stored.parts if f"{part.path}/lora_a" in adapters]
        if not parts:
            continue
        unmapped -= {part.path for part in parts}
        for layer in range(shapes[parts[0].path][0]):
            name = stored.name_of(layer).removesuffix(".weight")
            module = re.split(r"\.\d+\.", name)[1]
            ranks[module] = len(parts) * config.rank
            a, b = _fused(stored, parts, adapters, shapes, layer)
            tensors[f"{_PREFIX}{name}.lora_A.weight"] = a
            tensors[f"{_PREFIX}{name}.lora_B.weight"] = b
    if unmapped:
        raise ConfigError(
            f"{family.model_type} has no tensor for adapters of {', '.join(sorted(unmapped))}"
        )
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    fields = _config_fields(family, config, ranks, base)
    if saved_modules:
        fields |= {"modules_to_save": saved_modules, "task_type": "SEQ_CLS"}
    (target / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    return sum(x.nbytes for x in tensors.values())


def _config_fields(
    family: Family, config: LoraConfig, ranks: Mapping[str, int], base: str
) -> dict[str, Any]:
    """Makes adapter_config.json.

    Args:
      family: the base model's architecture.
      config: rank, alpha and dropout of the adapters.
      ranks: rank of each module's adapter, by the module's name.
      base: folder of the base model; "" = unknown.
    """
    multiplied = {name: rank for name, rank in ranks.items() if rank != config.rank}
    return _WRITTEN | {
        "base_model_name_or_path": base or None,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "target_modules": sorted(ranks),
        "rank_pattern": multiplied,
        "alpha_pattern": {
            name: config.alpha * rank / config.rank for name, rank in multiplied.items()
        },
        "fan_in_fan_out": family.model_type == "gpt2",
    }


def read(
    folder: Path | str, family: Family, config: LoraConfig, shapes: Shapes
) -> dict[str, np.ndarray]:
    """Reads A and B from a folder that PEFT or `write` wrote, and what was trained in full.

    Targets that the folder does not adapt get A = B = 0. Kernels that are trained in full
    are read if the folder has them (modules_to_save).

    Args:
      folder: the PEFT folder.
      family: the base model's architecture.
      config: the run's rank, alpha and targets.
      shapes: the shapes of the run's A and B, and of its kernels that are trained in
        full beside them, by path.

    Returns:
      A and B by path, float32; and the kernels that the folder has in full.

    Raises:
      ConfigError: it is no PEFT folder, it adapts a kernel that is no target, it has a
        kernel in full that the run does not train, or its rank, alpha or another
        setting differs from `config`.
    """
    folder = Path(folder).expanduser()
    try:
        fields = read_json(folder / CONFIG, dict)
        with open_tensors(folder / WEIGHTS) as file:
            names = file.keys()  # the file itself cannot be iterated
            tensors = {
                name.removeprefix(_PREFIX): file.get_tensor(name) for name in names
            }
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise ConfigError(
            f"lora.from_peft={folder}: no adapter that PEFT wrote: {error}"
        ) from error
    faults = []
    for name, supported in _SUPPORTED.items():
        if fields.get(name, supported[0]) not in supported:
            faults.append(
                f"{name}={fields[name]!r} is not supported; required {supported[0]!r}"
            )
    modules = fields.get("modules_to_save")
    if modules is not None and not isinstance(modules, list):
        faults.append(f"modules_to_save={modules!r:.40}: a list is required")
    faults += _scale_faults(fields)
    for name, x in tensors.items():
        if not all_finite(x):
            faults.append(f"{name} has NaN or infinite values")
    adapters = {
        path: np.zeros(dims, np.float32)
        for path, dims in shapes.items()
        if is_factor(path)
    }
    in_full: dict[str, np.ndarray] = {}
    if not faults:
        faults += _read_in_full(in_full, tensors, family, fields, shapes)
        for name in tensors:
            faults += _read_module(adapters, name, tensors, family, fields, config)
    if faults:
        shown = list(dict.fromkeys(faults))[:_SHOWN]
        raise ConfigError(f"lora.from_peft={folder}: {fault}" for fault in shown)
    return adapters | in_full


def _read_in_full(
    in_full: dict[str, np.ndarray],
    tensors: dict[str, np.ndarray],
    family: Family,
    fields: Mapping[str, Any],
    shapes: Shapes,
) -> Iterator[str]:
    """Reads the kernels that were trained in full, and takes them out of `tensors`.

    PEFT lists modules that the model does not have, too. They are skipped, and a tensor
    of theirs stays in `tensors`.

    Args:
      in_full: the kernels by path, which are filled in.
      tensors: all tensors of the PEFT folder.
      family: the base model's architecture.
      fields: the folder's adapter_config.json.
      shapes: the shapes of what the run trains, by path.

    Yields:
      What is wrong with a module; it is not read then.
    """
    for module in fields.get("modules_to_save") or []:
        stored = _stored_in_full(str(module), family)
        if stored is None:
            continue
        name = stored.name
        path = stored.parts[0].path
        x = tensors.pop(name, None)
        if path not in shapes:
            yield f"{module} was trained in full, and the run does not train it"
            continue
        if x is None:
            yield f"modules_to_save has {module}, and there is no tensor {name}"
            continue
        if x.T.shape != tuple(shapes[path]):
            yield f"{name} has shape {x.shape}; {tuple(shapes[path])[::-1]} is required"
            continue
        in_full[path] = np.ascontiguousarray(x.T, np.float32)


def _stored_in_full(module: str, family: Family) -> Stored | None:
    """Finds the table's tensor for a module that PEFT trains in full."""
    for stored in family.tensors:
        if f".{stored.name}".endswith(f".{module}.weight"):
            return stored
    return None


def _scale_faults(fields: Mapping[str, Any]) -> list[str]:
    """Checks lora_alpha and alpha_pattern, which scale the adapters."""
    alphas = {"lora_alpha": fields.get("lora_alpha", _DEFAULT_ALPHA)}
    patterns = fields.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        return [f"alpha_pattern={patterns!r:.40}: a mapping is required"]
    faults = list(pattern_faults("alpha_pattern", patterns, _MODULE_ENDS))
    for name, alpha in (alphas | patterns).items():
        if type(alpha) not in (int, float) or not math.isfinite(alpha):
            faults.append(f"{name}={alpha!r:.40}: a number is required")
    return faults


def _read_module(
    adapters: Adapters,
    name: str,
    tensors: Mapping[str, np.ndarray],
    family: Family,
    fields: Mapping[str, Any],
    config: LoraConfig,
) -> Iterator[str]:
    """Reads the A and B of one PEFT module into the run's adapters.

    Args:
      adapters: the run's A and B of all layers, which are filled in.
      name: the name of the module's A. Names of B are skipped.
      tensors: all tensors of the PEFT folder.
      family: the base model's architecture.
      fields: the folder's adapter_config.json.
      config: the run's rank and alpha.

    Yields:
      What is wrong with the module; it is not read then.
    """
    module, is_a, _ = name.partition(".lora_A.weight")
    if not is_a:
        if not name.endswith(".lora_B.weight"):
            yield f"the tensor {name} is not understood"
        return
    layer = 0
    match = re.search(r"\.(\d{1,9})\.", module)
    if match:
        layer = int(match[1])
    stored = _stored_of(module, layer, family)
    if stored is None:
        yield f"{module} has an adapter, but no kernel of {family.model_type} has that name"
        return
    if any(part.paired_like for part in stored.parts):
        yield f"{module} has an adapter of rows that rotate in pairs, which is not read"
        return
    paths = "".join(adapters)
    if "blocks/layer_0/" in paths or "first_blocks/" in paths:
        yield "adapters of a model with dense layers between those with experts are not read"
        return
    for part in stored.parts:
        if f"{part.path}/lora_a" not in adapters:
            yield f"{module} has an adapter, and {part.path} is no target; name it in lora.targets"
            return
    a = tensors[name]
    b = tensors.get(f"{module}.lora_B.weight")
    if b is None:
        yield f"{module} has no lora_B"
        return
    fault = _shape_fault(stored, adapters, layer, a, b)
    if fault:
        yield f"{module} {fault}"
        return
    rank = a.shape[0]
    scale = _scale(fields, module, rank)
    expected_scale = config.alpha / config.rank
    factors = _split(stored, adapters, a, b, config.rank)
    if factors is None:
        yield f"{module} has rank {rank}, lora.rank is {config.rank}; set lora.rank={rank}"
    elif not math.isclose(scale, expected_scale, rel_tol=1e-6):
        yield (
            f"{module} has alpha / rank = {scale:.6g}, lora.alpha={config.alpha:g} makes it "
            f"{expected_scale:.6g}; set lora.alpha={scale * config.rank:g}"
        )
    else:
        for path, value in factors.items():
            adapters[path][layer] = value


def _stored_of(module: str, layer: int, family: Family) -> Stored | None:
    """Finds the table's tensor for a PEFT module of a layer."""
    name = family.canonical(f"{module}.weight")
    for stored in family.tensors:
        if stored.parts[0].stacked == 1 and stored.name.format(layer) == name:
            return stored
    return None


def _shape_fault(
    stored: Stored, adapters: Adapters, layer: int, a: np.ndarray, b: np.ndarray
) -> str:
    """Checks the shapes of a module's A and B, but not their rank.

    Returns:
      What is wrong with them, or "".
    """
    if a.ndim != 2 or b.ndim != 2 or not 0 < a.shape[0] == b.shape[1]:
        return f"has lora_A {a.shape} and lora_B {b.shape}; required [rank, in] and [out, rank]"
    num_layers, *inputs, _ = adapters[f"{stored.parts[0].path}/lora_a"].shape
    num_outputs = 0
    for part in stored.parts:
        _, _, *outputs = adapters[f"{part.path}/lora_b"].shape
        num_outputs += math.prod(outputs)
    sizes = (math.prod(inputs), num_outputs)
    if layer >= num_layers or sizes != (a.shape[1], b.shape[0]):
        return (
            f"maps {a.shape[1]} values to {b.shape[0]}; "
            f"{num_layers} layers of {sizes} are required"
        )
    return ""


def _scale(fields: Mapping[str, Any], module: str, rank: int) -> float:
    """Computes the factor that PEFT multiplies a module's B A with."""
    alpha: float = fields.get("lora_alpha", _DEFAULT_ALPHA)
    for pattern, pattern_alpha in (fields.get("alpha_pattern") or {}).items():
        if is_whole(_MODULE_ENDS.format(pattern), module):
            alpha = pattern_alpha
            break
    divisor = math.sqrt(rank) if fields.get("use_rslora") else rank
    return alpha / divisor


# --- one module of PEFT and its kernels -----------------------------------------------


def _fused(
    stored: Stored,
    parts: list[TensorPart],
    adapters: Adapters,
    shapes: Shapes,
    layer: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Joins the adapters of one tensor's kernels in a layer.

    Args:
      stored: the tensor.
      parts: its parts that have adapters.
      adapters: A and B of all layers by path.
      shapes: the shapes of the kernels, by path.
      layer: the layer.

    Returns:
      PEFT's A [ranks, in] and B [out, ranks], float32, with as many ranks as the parts
      have together.
    """
    factors_a = [adapters[f"{part.path}/lora_a"][layer] for part in parts]
    rank = factors_a[0].shape[-1]
    num_inputs = factors_a[0].size // rank  # equal for all parts
    num_outputs = [
        math.prod(shapes[part.path][1:]) // num_inputs for part in stored.parts
    ]
    ends = np.cumsum(num_outputs)
    b = np.zeros((ends[-1], rank * len(parts)), np.float32)
    for number, part in enumerate(parts):
        end = ends[stored.parts.index(part)]
        factor_b = part.in_file_order(adapters[f"{part.path}/lora_b"][layer])
        block = factor_b.reshape(rank, -1).T
        b[end - len(block) : end, rank * number : rank * (number + 1)] = block
    a = np.concatenate(
        [np.asarray(factor, np.float32).reshape(-1, rank).T for factor in factors_a]
    )
    return np.ascontiguousarray(a), b


def _split(
    stored: Stored, adapters: Adapters, a: np.ndarray, b: np.ndarray, rank: int
) -> dict[str, np.ndarray] | None:
    """Splits a module's A and B among the kernels that its tensor holds.

    Args:
      stored: the tensor.
      adapters: the run's A and B of all layers by path, for their shapes.
      a: PEFT's A, [ranks, in].
      b: PEFT's B, [out, ranks].
      rank: the run's rank.

    Returns:
      A and B of a layer by path, float32; None if the ranks do not fit.
    """
    is_fused = a.shape[0] == rank * len(stored.parts)  # as `_fused` makes them
    if not is_fused and a.shape[0] != rank:
        return None
    factors = {}
    start = 0
    for number, part in enumerate(stored.parts):
        path_a = f"{part.path}/lora_a"
        path_b = f"{part.path}/lora_b"
        shape_a = adapters[path_a].shape[1:]
        shape_b = adapters[path_b].shape[1:]
        stop = start + math.prod(shape_b[1:])
        rows = b[start:stop]
        start = stop
        columns = slice(None)
        if is_fused:
            columns = slice(rank * number, rank * (number + 1))
            if np.delete(rows, np.r_[columns], axis=1).any():
                return None  # B is not block diagonal
        factors[path_a] = a[columns].T.reshape(shape_a).astype(np.float32)
        factors[path_b] = rows[:, columns].T.reshape(shape_b).astype(np.float32)
    return factors
