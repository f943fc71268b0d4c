"""Items of `on_device.py` other than a step and the loop; each writes one JSON file.

    python benchmarks/device/device_items.py profile --shape 1b --dtype bfloat16 --out profile.json

- machine: versions, memory, matmul and copy rates
- attention: the backends, forward and backward
- profile: the ten longest ops of a step
- plan: the prediction of `jaxdist.plan` against the measurement
- generate: tokens/s
- huggingface: from a folder of random weights to the first step
- tests: `pytest -m gpu`
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "shared"))

import jax
import jax.numpy as jnp
import measuring
import ml_dtypes
import numpy as np
import sides
from on_device import last_rows
from safetensors.numpy import save_file

from jaxdist.inference.decoding import SamplingConfig, text_generator
from jaxdist.ops.attention import attention
from jaxdist.ops.attention_backends import BACKENDS
from jaxdist.ops.attention_request import Options, Request
from jaxdist.planner import targets
from jaxdist.planner.compiler import CompileOptions
from jaxdist.planner.plan import make_plan
from jaxdist.telemetry import profile
from jaxdist.telemetry.metrics import read_rows
from jaxdist.telemetry.units import GIB
from jaxdist.trainer.run_config import RunConfig

Item = tuple[dict[str, Any], str]  # a record, and its line for the summary
LONGEST = 10  # ops that are shown
PROFILED = 3  # steps


def main() -> None:
    """Runs one item."""
    flags = sides.parse(_parser(), sys.argv[1:])
    sides.start(flags)
    run = sides.read_run(flags)
    record, line = ITEMS[flags.item](run, flags)
    chosen = {
        "name": flags.config or flags.shape,
        "model": dict(run.model),
        "compute": run.precision.compute,
    }
    head = (
        measuring.record_head(sys.argv[1:]) if flags.item not in WITHOUT_DEVICES else {}
    )
    record = head | {"run": chosen, **record, "summary": line}
    print(line)
    if head:
        measuring.write(flags.out, record)
    elif flags.out:
        Path(flags.out).write_text(json.dumps(record, indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("item", choices=ITEMS)
    sides.add_run_flags(parser)
    parser.add_argument("--records", help="plan: JSON lines of on_device.py ...")
    parser.add_argument(
        "--measured", help="... and the item among them that was measured"
    )
    parser.add_argument(
        "--prompt", type=int, default=512, help="generate: tokens of a prompt"
    )
    parser.add_argument(
        "--tokens", type=int, default=256, help="generate: new tokens of each"
    )
    parser.add_argument("--tests-on", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--out", help="JSON file")
    return parser


# -------------------------------------------------------------------------- the machine


def machine(run: RunConfig, flags: argparse.Namespace) -> Item:
    """Returns what there is: memory, driver, cuDNN, and the rates of a matmul and of a
    copy.
    """
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    size = 1024 if on_cpu else 8192
    rates = {
        dtype: measuring.matmul_rate(dtype, size=size, repeats=10)["flops_per_s"]
        for dtype in ("bfloat16", "float32")
    }
    elements = 2**22 if on_cpu else 2**30
    copied = (
        8
        * elements
        / _seconds(jax.jit(lambda x: x + 1), jnp.zeros(elements, jnp.float32))
    )
    record = {
        "memory_bytes": (device.memory_stats() or {}).get("bytes_limit"),
        "matmul_size": size,
        "matmul_flops_per_s": rates,
        "copy_bytes_per_s": copied,
        "nvidia_smi": _last_line(
            "nvidia-smi", "--query-gpu=name,driver_version,power.limit", "--format=csv"
        ),
        "flags": {
            name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
        },
    }
    matmul = ", ".join(f"{dtype} {rate / 1e12:,.3g}" for dtype, rate in rates.items())
    return (
        record,
        f"{device.device_kind}: matmul {matmul} TFLOP/s, copy {copied / 1e9:,.0f} GB/s",
    )


def _last_line(*command: str) -> str | None:
    """Returns the last line that a command prints, None where it is not here."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True)
    return (done.stdout.strip().splitlines() or [None])[-1]


def _seconds(
    call: Callable[..., Any], *arguments: Any, at_least_s: float = 0.2
) -> float:
    """Returns the median seconds of a call; calls run behind one another, as the layers
    of a step do.
    """
    jax.block_until_ready(call(*arguments))
    once = measuring.timed(lambda: jax.block_until_ready(call(*arguments))).wall_s
    count = max(1, round(at_least_s / once))

    def several() -> None:
        for _ in range(count):
            # the one before is let go: together they may be more than there is
            found = call(*arguments)
        jax.block_until_ready(found)

    return statistics.median(measuring.timed(several).wall_s for _ in range(5)) / count


# ---------------------------------------------------------------------------- attention


def attention_backends(run: RunConfig, flags: argparse.Namespace) -> Item:
    """Returns forward and forward-and-backward times of each backend, at the run's
    sizes.
    """
    c, length, size = run.model, run.batch.sequence_length, run.batch.global_size
    keys, dtype = jax.random.split(jax.random.key(0), 3), run.precision.compute
    heads = c["num_heads"], c["num_kv_heads"], c["num_kv_heads"]
    q, k, v = (
        jax.random.normal(key, (size, length, h, c["head_dim"]), dtype)
        for key, h in zip(keys, heads, strict=True)
    )
    # half of the pairs
    forward_flops = 2 * size * length**2 * c["num_heads"] * c["head_dim"]
    documents = jnp.broadcast_to(
        jnp.arange(length) // (length // 4), (size, length)
    ).astype(jnp.int32)
    cases: dict[str, dict[str, Any]] = {
        "causal": {},
        "segments": {"segment_ids_BS": documents},
        "window": {"window": length // 4},
        "softcap": {"softcap": 50.0},
    }
    rows = []
    for name, options in cases.items():
        shaped = Options(1.0, True, options.get("softcap"), options.get("window"))
        request = Request(q, k, v, options.get("segment_ids_BS"), shaped)
        for backend, what in BACKENDS.items():
            row: dict[str, Any] = {"case": name, "backend": backend}
            if row_refusal := what.refusal(request):
                rows.append(row | {"refused": row_refusal})
                continue
            row |= _attention_times(q, k, v, options | {"implementation": backend})
            # Of segments and windows a backend may skip pairs, so how many it computed
            # is not known.
            whole = {"forward_flops_per_s": forward_flops / row["forward_s"]}
            rows.append(row | (whole if name in ("causal", "softcap") else {}))
    timed = [row for row in rows if row["case"] == "causal" and "forward_s" in row]
    shown = (
        f"{row['backend']} {1e3 * row['forward_s']:.2f} ms forward, {1e3 * row['both_s']:.2f} with backward"
        for row in timed
    )
    return {
        "shape": {"q": q.shape, "k": k.shape},
        "rows": rows,
    }, f"attention {q.shape}: {'; '.join(shown)}"


def _attention_times(
    q: jax.Array, k: jax.Array, v: jax.Array, options: dict[str, Any]
) -> dict[str, float]:
    forward = partial(attention, **options)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return forward(q, k, v).astype(jnp.float32).sum()

    both = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    return {
        "forward_s": _seconds(jax.jit(forward), q, k, v),
        "both_s": _seconds(both, q, k, v),
    }


# ------------------------------------------------------------------------------ profile


def profiled_step(run: RunConfig, flags: argparse.Namespace) -> Item:
    """Returns the longest ops of a step, each with the part of the model that it comes
    from.
    """
    side = sides.build_jaxdist(run, sides.full_batch(run))
    side.advance(2)
    with tempfile.TemporaryDirectory() as folder:
        window = profile.ProfileWindow(folder, 1, PROFILED)
        window.step(0, side.metrics)
        took = measuring.timed(partial(side.advance, PROFILED)).wall_s
        ops = window.step(PROFILED, side.metrics) or []
        kernels = list(_kernels(Path(folder))) if not ops else []
    parts = dict(
        re.findall(
            r'%?([\w.\-]+) = [^\n]*op_name="([^"]+)"', side.compiled.as_text() or ""
        )
    )
    rows = [
        {
            "op": op.op,
            "kind": op.kind,
            "part": parts.get(op.op),
            "share": op.share,
            "ms_per_step": 1e3 * op.seconds / PROFILED / jax.local_device_count(),
            "count": op.count,
        }
        for op in ops[:LONGEST]
    ]
    busy = sum(op.seconds for op in ops) / jax.local_device_count() / took
    record = {
        "step_s": took / PROFILED,
        "share_in_ops": busy,
        "ops": rows,
        "kernels": kernels,
    }
    first = ", ".join(f"{row['op']} {row['share']:.1%}" for row in rows[:3])
    return (
        record,
        f"profile: {1e3 * took / PROFILED:.1f} ms a step, longest: {first or kernels[:3]}",
    )


def _kernels(folder: Path) -> Iterator[tuple[str, float]]:
    """Yields (name, ms a step) of the longest events of a device, where none says which
    op it is of.
    """
    trace = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    total: dict[str, float] = {}
    for plane in jax.profiler.ProfileData.from_file(str(trace)).planes:
        if "/device:" in plane.name:
            for line in plane.lines:
                for event in line.events:
                    total[event.name] = (
                        total.get(event.name, 0.0) + 1e-6 * event.duration_ns / PROFILED
                    )
    yield from sorted(total.items(), key=lambda pair: -pair[1])[:LONGEST]


# --------------------------------------------------------------------------------- plan


def predicted(run: RunConfig, flags: argparse.Namespace) -> Item:
    """Returns what the planner says of the run on this hardware, and its distance from
    a measured item.
    """
    target = targets.parse("here", jax.devices())
    measured = _measured(flags)
    plan = make_plan(
        run,
        target,
        options=CompileOptions(memory_bytes=24 * GIB, timeout_s=1200),
        say=print,
    )
    found = plan.to_json()
    kept = {
        name: found[name]
        for name in ("fits", "exit_reason", "target", "memory", "time", "warnings")
    }
    record: dict[str, Any] = {"predicted": kept, "measured": measured}
    words = [f"{plan.exit_reason}"]
    if measured:
        step_s, bytes_, ours = (
            measured["step_s"]["median"],
            taken_bytes(measured),
            plan.time,
        )
        record |= {
            "time_ratio": ours.step_s / step_s if ours.step_s else None,
            "memory_ratio": plan.peak_bytes / bytes_ if plan.peak_bytes else None,
            "in_band": ours.band_s[0] <= step_s <= ours.band_s[1]
            if ours.band_s
            else None,
        }
        if ours.step_s:
            words.append(f"{1e3 * ours.step_s:.0f} ms of {1e3 * step_s:.0f} measured")
        if plan.peak_bytes:
            words.append(
                f"{plan.peak_bytes / GIB:.2f} GiB of {bytes_ / GIB:.2f} measured"
            )
    return record, f"plan for {target.text}: {', '.join(words)}"


def _measured(flags: argparse.Namespace) -> dict[str, Any] | None:
    """Returns jaxdist's side of the item --measured in --records, and if it was alone;
    None without it.
    """
    if not flags.records:
        return None
    row = last_rows(Path(flags.records).parent).get(flags.measured, {})
    if row.get("status") != "done":
        return None
    record = row["record"]
    return record["sides"]["jaxdist"] | {
        "alone": record["apart"] or len(record["sides"]) == 1
    }


def taken_bytes(side: dict[str, Any]) -> int:
    """Returns the memory of a measured side: by the device if it was alone there, else
    by its program.
    """
    program = (
        side["argument_bytes"]
        + side["temp_bytes"]
        + side["output_bytes"]
        - side["alias_bytes"]
    )
    return (side["alone"] and side["device_peak_bytes"]) or program


# --------------------------------------------------------------------------- generation


def generation(run: RunConfig, flags: argparse.Namespace) -> Item:
    """Returns tokens/s of decoding with random weights, and the seconds before the
    first token.
    """
    spec, step = sides.built(run)
    state = step.init()
    weights = state.model_arrays
    del state
    generate = text_generator(spec, step, compute=run.precision.compute)
    assert generate is not None
    size, most = run.batch.global_size, flags.tokens
    tokens = np.random.default_rng(0).integers(0, run.vocab_size, (size, flags.prompt))
    sampling = SamplingConfig(temperature=0)

    def timed(new: int) -> float:
        call = partial(
            generate, weights, list(tokens), max_tokens=new, sampling=sampling
        )
        call()
        return statistics.median(measuring.timed(call).wall_s for _ in range(3))

    half = most // 2 + 1  # the same compiled program: sizes are powers of two
    whole_s, half_s = timed(most), timed(half)
    each_s = (whole_s - half_s) / (most - half)
    if each_s <= 0:
        raise SystemExit(
            f"{most} tokens took no longer than {half}: give more --tokens or a quieter machine"
        )
    record = {
        "rows": size,
        "prompt_tokens": flags.prompt,
        "new_tokens": most,
        "seconds": whole_s,
        "tokens_per_s": size * most / whole_s,
        "decode_tokens_per_s": size / each_s,
        "first_token_s": whole_s - each_s * (most - 1),
    }
    words = f"{record['decode_tokens_per_s']:,.0f} tokens/s decoding {size} rows"
    return (
        record,
        f"generation: {words}, first token after {1e3 * record['first_token_s']:.0f} ms",
    )


# -------------------------------------------------------------------------- huggingface


def from_huggingface(run: RunConfig, flags: argparse.Namespace) -> Item:
    """Returns the seconds from process start to the end of the first step that begins
    with HF weights.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, workdir = Path(name) / "model", Path(name) / "run"
        size = write_folder(run, folder)
        tokens = np.random.default_rng(0).integers(0, run.vocab_size or 256, 2_000_000)
        tokens.astype(np.uint32).tofile(Path(name) / "tokens.bin")
        settings = {
            "init.from_huggingface": folder,
            "data.source": "bin",
            "data.bin_dtype": "uint32",
            "data.path": Path(name) / "tokens.bin",
            "data.cache_dir": Path(name) / "cache",
            "batch.global_size": run.batch.global_size,
            "batch.sequence_length": run.batch.sequence_length,
            "precision.compute": run.precision.compute,
            # the recipe of the config `finetune`: other rates are refused
            "optimizer.name": "adamw",
            "optimizer.learning_rate": 2e-5,
            "train.steps": 2,
            "train.log_every": 1,
            "train.eval_every": 0,
            "train.sample_tokens": 0,
            "checkpoint.every_steps": 0,
            "checkpoint.save_at_end": "false",
        }
        words = [f"--config.{key}={value}" for key, value in settings.items()]
        command = [
            sys.executable,
            "-m",
            "jaxdist.train",
            "--config",
            "quickstart",
            "--workdir",
            str(workdir),
        ]
        began = time.time()
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}")
        rows = read_rows(workdir).train
        ledger = json.loads((workdir / "ledger.json").read_text())
    record = {
        "folder_bytes": size,
        "first_step_s": rows[0]["time"] - began,
        "ledger": ledger,
    }
    record |= {
        "second_step_s": rows[1]["time"] - rows[0]["time"],
        "first_loss": rows[0]["loss"],
    }
    gib = f"{size / GIB:.2f} GiB of Hugging Face weights"
    return (
        record,
        f"{gib}: first step after {record['first_step_s']:.1f} s, process start included",
    )


def write_folder(run: RunConfig, folder: Path) -> int:
    """Writes a Llama of the run's sizes with random bfloat16 weights; returns their
    bytes.
    """
    c, block = (
        run.model,
        np.random.default_rng(0).normal(0, 0.02, 2**22).astype(ml_dtypes.bfloat16),
    )

    # one block of normals again and again: only time is measured
    def random(*dims: int) -> np.ndarray:
        return np.resize(block, dims)

    wide, narrow = (c[heads] * c["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    D, F = c["d_model"], c["d_ff"]
    tensors = {"model.embed_tokens.weight": random(c["vocab_size"], D)}
    tensors |= {
        "lm_head.weight": random(c["vocab_size"], D),
        "model.norm.weight": np.ones(D, block.dtype),
    }
    for i in range(c["num_layers"]):
        dims = {
            "self_attn.q_proj": (wide, D),
            "self_attn.k_proj": (narrow, D),
            "self_attn.v_proj": (narrow, D),
        }
        dims |= {
            "self_attn.o_proj": (D, wide),
            "mlp.gate_proj": (F, D),
            "mlp.up_proj": (F, D),
        }
        dims |= {"mlp.down_proj": (D, F)}
        tensors |= {
            f"model.layers.{i}.{name}.weight": random(*size)
            for name, size in dims.items()
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors |= {
            f"model.layers.{i}.{name}.weight": np.ones(D, block.dtype) for name in norms
        }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": c["vocab_size"],
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": c["num_layers"],
        "num_attention_heads": c["num_heads"],
        "num_key_value_heads": c["num_kv_heads"],
        "head_dim": c["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": c["norm_eps"],
        "rope_theta": c["rope_theta"],
        "max_position_embeddings": run.batch.sequence_length,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return sum(x.nbytes for x in tensors.values())


# -------------------------------------------------------------------------------- tests


def gpu_tests(run: RunConfig, flags: argparse.Namespace) -> Item:
    """Returns how many tests of `pytest -m gpu` pass, and what the others say."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "tests.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-p",
            "no:cacheprovider",
            "tests/gpu",
        ]
        environment = os.environ | {"JAXDIST_GPU_TESTS_ON": flags.tests_on}
        done = subprocess.run(
            [*command, f"--junitxml={file}"],
            cwd=measuring.ROOT,
            env=environment,
            text=True,
        )
        if not file.is_file():
            raise SystemExit(f"pytest ended with {done.returncode} and no report")
        cases = list(ElementTree.parse(file).iter("testcase"))
    kinds: dict[str, list[dict[str, str | None]]] = {"failed": [], "skipped": []}
    for case in cases:
        for kind, tags in {
            "failed": ("failure", "error"),
            "skipped": ("skipped",),
        }.items():
            for fault in (found for tag in tags for found in case.findall(tag)):
                text = (fault.text or "")[-1500:] if kind == "failed" else None
                kinds[kind].append(
                    {"test": case.get("name"), "why": fault.get("message"), "end": text}
                )
    passed = len(cases) - sum(map(len, kinds.values()))
    line = f"pytest -m gpu: {passed} passed, {len(kinds['failed'])} failed, {len(kinds['skipped'])} skipped"
    seconds = {str(case.get("name")): float(case.get("time", 0)) for case in cases}
    return {"passed": passed, **kinds, "seconds": seconds, "on": flags.tests_on}, line


ITEMS: dict[str, Callable[[RunConfig, argparse.Namespace], Item]] = {
    "machine": machine,
    "attention": attention_backends,
    "profile": profiled_step,
    "plan": predicted,
    "generate": generation,
    "huggingface": from_huggingface,
    "tests": gpu_tests,
}
# their own processes need the accelerator's memory
WITHOUT_DEVICES = ("huggingface", "tests")

if __name__ == "__main__":
    raise SystemExit(sides.report_faults(main))
