"""`python -m jaxdist.doctor`: what is here, what a run would set, and what MFU will mean."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform as host
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

import jaxdist
from jaxdist import extras, hardware, machine, recipe
from jaxdist.config import ConfigError
from jaxdist.data import DataConfig
from jaxdist.mesh import count_slices

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "libtpu", "jax-cuda13-plugin",
            "jax-cuda12-plugin", "numpy")  # fmt: skip
GIB = 2**30


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns 0: what is missing is said, not a failure."""
    parser = argparse.ArgumentParser(prog="jaxdist doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        raise ConfigError([f"{item}: no such flag; --help lists them" for item in unknown])
    machine.skip_absent_tpu(os.environ)
    report = examine(os.environ)
    print(json.dumps(report, indent=1) if flags.json else as_text(report))
    return 0


def examine(environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns everything that the doctor looks at, as plain JSON values, by section."""
    platform = hardware.detect_platform(environ)
    try:
        devices, trouble = jax.devices(), None
    except Exception as error:  # plugins fail in many ways, and this is what one asks the doctor
        devices, trouble = [], " ".join(f"{type(error).__name__}: {error}".split())
    chip = hardware.chip_for(devices[0].device_kind) if devices else None
    versions = _versions()
    return {
        "devices": _devices(devices, trouble, environ),
        "versions": versions | {"faults": version_faults(versions)},
        "chip": _chip(devices, chip),
        "host": {
            "cpus": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "disk": _disk(environ),
        "extras": {
            module: {"present": _is_there(module), "install": f'pip install "jaxdist[{extra}]"'}
            for module, extra in sorted(extras.EXTRAS.items())
        },
        "flags": _flags(platform, environ),
        "mfu": mfu_meaning(devices[0].device_kind if devices else "no device", chip),
    }


# --- sections -------------------------------------------------------------------------------------


def _devices(
    devices: list[jax.Device], trouble: str | None, environ: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "platform": devices[0].platform if devices else None,
        "device_kind": devices[0].device_kind if devices else None,
        "count": len(devices),
        "slices": count_slices(devices) if devices else 0,
        "processes": jax.process_count() if devices else 0,
        "launcher": machine.detect_launcher(environ) or "none: one process",
        "trouble": trouble,
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"jaxdist": jaxdist.__version__, "python": host.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def version_faults(versions: Mapping[str, str | None]) -> list[str]:
    """Returns which packages do not belong together, each with its cure.

    jax runs with a jaxlib of its own number (it allows some older ones), a CUDA plugin must have
    jaxlib's number, and jax's metadata says which libtpu it was tested with.
    """
    jax_version, jaxlib = versions["jax"], versions["jaxlib"]
    faults = []
    if _numbers(jaxlib) != _numbers(jax_version):
        faults.append(f"jaxlib {jaxlib} with jax {jax_version}: pip install jaxlib=={jax_version}")
    for plugin in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        if (found := versions[plugin]) and _numbers(found) != _numbers(jaxlib):
            faults.append(f"{plugin} {found} with jaxlib {jaxlib}: pip install {plugin}=={jaxlib}")
    wanted, libtpu = required_libtpu(metadata.requires("jax") or []), versions["libtpu"]
    if libtpu and wanted and not (libtpu + ".").startswith(wanted + "."):
        faults.append(
            f"libtpu {libtpu} with jax {jax_version}, which was tested with {wanted}: "
            f'pip install "jax[tpu]=={jax_version}"'
        )
    return faults


def _numbers(version: str | None) -> list[str]:
    """Returns the first three numbers of a version."""
    return re.findall(r"\d+", version or "")[:3]


def required_libtpu(requirements: list[str]) -> str | None:
    """Returns the libtpu version (or its beginning) that jax's extra `tpu` asks for."""
    for line in requirements:
        if match := re.match(r"libtpu\s*\(?==\s*([\d.]+?)(\.\*)?\)?\s*(;|$)", line):
            return match[1]
    return None


def _chip(devices: list[jax.Device], chip: hardware.Chip | None) -> dict[str, Any] | None:
    if chip is None:
        return None
    return {
        "name": chip.name,
        "peak_flops_per_s": dict(chip.peak_flops_per_s),
        "hbm_bytes": chip.hbm_bytes,
        "usable_hbm_bytes": chip.compiler_hbm_bytes or _bytes_limit(devices[0]),
        "hbm_bytes_per_s": chip.hbm_bytes_per_s,
        "link": chip.link,
        "num_links": chip.num_links,
        "link_bytes_per_s": chip.link_bytes_per_s,
        "source": chip.source,
    }


def _bytes_limit(device: jax.Device) -> int | None:
    """Returns what the runtime will let a program have, where it says so."""
    return (device.memory_stats() or {}).get("bytes_limit")


def _disk(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    compiled = machine.compile_cache_folder(environ)
    chosen = environ.get("JAX_COMPILATION_CACHE_DIR")
    folders = {
        "runs": Path("runs").absolute(),
        "tokenised data": DataConfig().cache_folder(),
        "compiled programs": compiled or (Path(chosen) if chosen else None),
    }
    return {
        name: {"folder": str(folder or "off"), **(_free(folder) if folder else {})}
        for name, folder in folders.items()
    }


def _free(folder: Path) -> dict[str, Any]:
    """Returns free bytes of the file system that holds, or would hold, a folder."""
    existing = next((f for f in (folder, *folder.parents) if f.exists()), Path("."))
    return {
        "free_bytes": shutil.disk_usage(existing).free,
        "writable": os.access(existing, os.W_OK),
    }


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _flags(platform: hardware.Platform, environ: Mapping[str, str]) -> list[dict[str, Any]]:
    changes = hardware.flag_environment(platform, environ)
    return [
        {
            "setting": " ".join(filter(None, (flag.variable, flag.name))),
            "value": flag.value,
            "set_by_train": flag.variable in changes
            and (flag.name or flag.value) in changes[flag.variable],
            "why": flag.why,
            "source": flag.source,
        }
        for flag in hardware.platform_flags(platform)
    ]


def mfu_meaning(device_kind: str, chip: hardware.Chip | None) -> str:
    """Returns what `mfu` in metrics.jsonl will be on this device."""
    if chip is None:
        return f"{device_kind}: peak unknown, so mfu will be null; it is never guessed"
    peak = chip.peak("bfloat16")
    if peak is None:
        return f"{chip.name}: no published bfloat16 peak, so mfu will be null in bfloat16"
    return (
        f"model FLOPs (causal attention, no recomputation) / (time x {peak / 1e12:g} TFLOP/s in "
        f"bfloat16 x devices); precisions without a published peak give null"
    )


# --- text -----------------------------------------------------------------------------------------


def as_text(report: Mapping[str, Any]) -> str:
    """Returns the report for people, section by section."""
    devices, versions, chip = report["devices"], dict(report["versions"]), report["chip"]
    faults = versions.pop("faults")
    sections = {
        "devices": [
            f"{devices['count']} x {devices['device_kind']} ({devices['platform']}), "
            f"{devices['slices']} slice(s), {devices['processes']} process(es)",
            f"launcher: {devices['launcher']}",
            *([f"TROUBLE: {devices['trouble']}"] if devices["trouble"] else []),
        ],
        "versions": [
            ", ".join(f"{name} {version}" for name, version in versions.items() if version),
            *(f"MISMATCH: {fault}" for fault in faults),
            *([] if faults else ["jax, jaxlib and plugins belong together"]),
        ],
        "chip": _chip_lines(chip),
        "host": [
            f"{report['host']['cpus']} CPUs, {report['host']['memory_bytes'] / GIB:.1f} GiB memory"
        ],
        "disk": [_disk_line(name, place) for name, place in report["disk"].items()],
        "extras": [
            f"{module}: " + ("present" if found["present"] else f"missing; {found['install']}")
            for module, found in report["extras"].items()
        ],
        "flags that train sets": [_flag_line(flag) for flag in report["flags"]] or ["none"],
        "mfu": [report["mfu"]],
    }
    return "\n".join(
        line for name, lines in sections.items() for line in (name, *(f"  {x}" for x in lines))
    )


def _chip_lines(chip: Mapping[str, Any] | None) -> list[str]:
    if chip is None:
        return ["peak, memory and links unknown: MFU will be null"]
    peaks = (f"{dtype} {peak / 1e12:g}" for dtype, peak in chip["peak_flops_per_s"].items())
    usable = chip["usable_hbm_bytes"]
    return [
        f"{chip['name']}, per device: peak TFLOP/s {', '.join(peaks)}",
        f"memory {chip['hbm_bytes'] / GIB:.1f} GiB"
        + (f", {usable / GIB:.2f} GiB usable" if usable else "")
        + f", {chip['hbm_bytes_per_s'] / 1e9:g} GB/s",
        f"links: {chip['num_links']} x {chip['link']}, {chip['link_bytes_per_s'] / 1e9:g} GB/s "
        "each way",
        f"source: {chip['source']}",
    ]


def _disk_line(name: str, place: Mapping[str, Any]) -> str:
    if "free_bytes" not in place:
        return f"{name}: {place['folder']}"
    blocked = "" if place["writable"] else " (NOT WRITABLE)"
    return f"{name}: {place['folder']}, {place['free_bytes'] / GIB:.1f} GiB free{blocked}"


def _flag_line(flag: Mapping[str, Any]) -> str:
    kept = "" if flag["set_by_train"] else " (your own value stays)"
    return f"{flag['setting']}={flag['value']}{kept}: {flag['why']} [{flag['source']}]"


if __name__ == "__main__":
    recipe.main_with_config_errors(main)
