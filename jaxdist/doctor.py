"""Devices, versions, peak rates, links, disk and platform flags of this machine.

It also says where the configs, examples and deploy files of this installation are.

The last line explains the `mfu` that runs record here. Example: `jaxdist doctor`.
"""

import dataclasses
import json
import os
import platform as host
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

import jaxdist
from jaxdist.config import command_line, extras, installation
from jaxdist.data import DataConfig
from jaxdist.distributed import initialize
from jaxdist.distributed.network import network_faults
from jaxdist.hardware import chips
from jaxdist.hardware import flags as platform_flags
from jaxdist.hardware import host as machine
from jaxdist.parallel.formats.floats import NO_BFLOAT16, lacks_bfloat16
from jaxdist.parallel.mesh import count_slices
from jaxdist.parallel.precision import UNITS
from jaxdist.planner.compiler import PACKAGES, version_faults, versions
from jaxdist.telemetry.units import gib_text
from jaxdist.trainer import exit_code


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns 0, even if something is missing."""
    parser = command_line.Parser(prog="jaxdist doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    flags = parser.parse_args(arguments)
    initialize.skip_absent_tpu(os.environ)
    report = examine(os.environ)
    print(json.dumps(report, indent=1) if flags.json else as_text(report))
    return 0


def examine(environ: Mapping[str, str], root: Path = Path("/")) -> dict[str, Any]:
    """Collects the facts of this machine as plain JSON values, by section.

    Args:
      environ: the environment variables.
      root: folder that stands for `/` when system files are read.
    """
    devices = []
    trouble = None
    try:
        devices = jax.devices()
    except Exception as error:  # plugins raise many types; the report shows them all
        trouble = " ".join(f"{type(error).__name__}: {error}".split())
    kind = devices[0].device_kind if devices else "no device"
    chip = chips.chip_for(kind)
    installed: dict[str, str | None] = {
        "jaxdist": jaxdist.__version__,
        "python": host.python_version(),
    }
    installed |= dict.fromkeys(PACKAGES) | versions()
    compile_cache = initialize.compile_cache_folder(environ) or environ.get(
        "JAX_COMPILATION_CACHE_DIR"
    )
    advice = None
    if devices and lacks_bfloat16(devices[0]):
        advice = f"{kind} {NO_BFLOAT16}"
    return {
        "devices": {
            "platform": devices[0].platform if devices else None,
            "device_kind": kind,
            "count": len(devices),
            "slices": count_slices(devices) if devices else 0,
            "processes": jax.process_count() if devices else 0,
            "launcher": initialize.detect_launcher(environ) or "none: one process",
            "advice": advice,
            "trouble": trouble,
        },
        "versions": installed | {"faults": version_faults(installed)},
        "chip": chip and _chip(chip, devices[0]),  # None: not in the table of chips
        "host": {
            "cpus": os.cpu_count(),
            "memory_bytes": machine.memory_bytes(),
        },
        "disk": {
            "runs": _disk(Path("runs").absolute()),
            "tokenized data": _disk(DataConfig().cache_folder()),
            "compiled programs": _disk(compile_cache),
        },
        "shipped files": {
            name: str(installation.shipped_folder(name) or "none")
            for name in ("configs", "examples", "deploy")
        },
        "network": [fault._asdict() for fault in network_faults(root, environ)],
        "extras": {
            module: _presence(module, extra)
            for module, extra in sorted(extras.EXTRAS.items())
        },
        "flags": _flags(environ),
        "mfu": mfu_meaning(kind, chip),
    }


def _chip(chip: chips.Chip, device: jax.Device) -> dict[str, Any]:
    runtime_limit = (device.memory_stats() or {}).get("bytes_limit")
    return dataclasses.asdict(chip) | {
        "usable_hbm_bytes": chip.compiler_hbm_bytes or runtime_limit
    }


def _presence(module: str, extra: str) -> str:
    if find_spec(module):
        return "present"
    return f"missing: {extras.install_command(extra)}"


def _disk(folder: Path | str | None) -> dict[str, Any]:
    """Describes the file system of a folder, which need not exist yet."""
    if not folder:
        return {"folder": "off"}
    existing = next(f for f in (Path(folder), *Path(folder).parents) if f.exists())
    return {
        "folder": str(folder),
        "free_bytes": shutil.disk_usage(existing).free,
        "writable": os.access(existing, os.W_OK),
    }


def _flags(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    platform = platform_flags.detect_platform(environ)
    family = platform_flags.detect_family(environ)
    changes = platform_flags.flag_environment(platform, environ, family=family)
    return [
        {
            "setting": flag.setting,
            "value": flag.value,
            "set_by_train": (flag.name or flag.value) in changes.get(flag.variable, ""),
            "why": flag.why,
            "source": flag.source,
        }
        for flag in platform_flags.flags_for(platform, family)
    ]


def mfu_meaning(device_kind: str, chip: chips.Chip | None) -> str:
    """Explains the `mfu` field of metrics.jsonl on this kind of device."""
    if chip is None:
        return f"{device_kind}: peak unknown, so mfu will be null; it is never guessed"
    peak = chip.peak("bfloat16")
    if peak is None:
        return (
            f"{chip.name}: no published bfloat16 peak, so mfu will be null in bfloat16"
        )
    other = ""
    for units in UNITS:
        faster = chip.peak(units.peak)
        if faster is not None and units.gain(chip):
            other += (
                f" ({faster / 1e12:g} where precision.matmul is in {units.numbers})"
            )
    return (
        f"model FLOPs (causal attention, no recomputation) / (time x {peak / 1e12:g} TFLOP/s in "
        f"bfloat16{other} x devices); precisions without a published peak give null"
    )


def as_text(report: Mapping[str, Any]) -> str:
    """Formats the report for people, section by section, without null values."""
    lines = []
    for name, section in report.items():
        lines.append(name)
        if isinstance(section, dict):
            for key, value in section.items():
                if value is not None:
                    lines.append(f"  {key}: {_text(f'{name}.{key}', value)}")
            continue
        items = section if isinstance(section, list) else [section]
        texts = [_text(name, item) for item in items if item is not None]
        lines += [f"  {text}" for text in texts or [_ABSENT.get(name, "none")]]
    return "\n".join(lines)


# texts of sections without content
_ABSENT = {"chip": "not in the table of chips: its rates and memory are unknown"}


def _text(path: str, value: Any) -> str:
    """Formats a value in the unit that its path names."""
    if isinstance(value, Mapping):
        if "cure" in value:
            return f"{value['check']}: {value['fault']}; fix: {value['cure']}"
        pairs = [
            f"{key} {_text(f'{path}.{key}', x)}"
            for key, x in value.items()
            if x is not None
        ]
        return ", ".join(pairs)
    if isinstance(value, list | tuple):
        return "; ".join(_text(path, item) for item in value) or "none"
    if "flops_per_s" in path:
        return f"{value / 1e12:g} TFLOP/s"
    if "bytes_per_s" in path:
        return f"{value / 1e9:g} GB/s"
    if "bytes" in path:
        return gib_text(value)
    return str(value)


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
