"""The plan command and its compiler child: real compiles of tiny steps for TPUs that
are not here.
"""

import dataclasses
import importlib.metadata
import json
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from jaxdist import plan, train
from jaxdist.config import ConfigError
from jaxdist.config.extras import MissingExtra
from jaxdist.planner import (
    compiled_step,
    compiler,
    observed,
    restarts,
    show,
    targets,
    worker,
)
from jaxdist.planner import plan as plan_module
from jaxdist.planner.compiler import (
    CannotTell,
    CompileOptions,
    compile_run,
    compiler_flags,
)
from jaxdist.planner.plan import make_plan, plan_by_arithmetic
from jaxdist.trainer import cli, compose, run_config, training

needs_libtpu = pytest.mark.skipif(
    not find_spec("libtpu"), reason='pip install -e ".[aot]"'
)
TINY = {
    "model.num_layers": "2",
    "model.d_model": "256",
    "model.d_ff": "256",
    "model.num_heads": "1",
    "model.num_kv_heads": "1",
    "model.head_dim": "128",
    "model.vocab_size": "512",
    "mesh.data": "1",
    "mesh.fsdp": "-1",
    "optimizer.name": "adamw",
    "batch.sequence_length": "128",
    "precision.compute": "bfloat16",
}
SMALLEST = TINY | {"model.num_layers": "1", "model.d_model": "32", "model.d_ff": "32"}
# LLVM's work changes nothing that is looked at
QUICKLY = (("xla_backend_optimization_level", 0),)


def flags(overrides: dict[str, str]) -> list[str]:
    return [
        "--config",
        "quickstart",
        *(f"--config.{name}={value}" for name, value in overrides.items()),
    ]


def run_of(overrides: dict[str, str]) -> run_config.RunConfig:
    return cli.parse(cli.ConfigParser("test", None), flags(overrides))[1]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def tpu_plan(cache):
    return make_plan(
        run_of(TINY), targets.parse("v5e:2x2"), options=CompileOptions(cache=cache)
    )


@needs_libtpu
def test_a_plan_holds_what_the_compiler_says(tpu_plan):
    assert tpu_plan.fits is True
    assert tpu_plan.exit_code == 0, tpu_plan.exit_reason
    found, devices = tpu_plan.compiled, tpu_plan.target.num_devices
    batch = (
        sum(
            x.size * x.dtype.itemsize
            for x in compose.batch_shapes(tpu_plan.run, 16).values()
        )
        / devices
    )
    state = 12 * tpu_plan.composition.spec.parameter_count / devices
    assert found.argument_bytes == pytest.approx(state + batch, rel=0.01)
    # the whole state is donated
    assert found.alias_bytes == pytest.approx(state, rel=0.01)
    assert not any("donated" in warning for warning in tpu_plan.warnings)
    assert 0 < found.temp_bytes < found.peak_bytes < tpu_plan.capacity_bytes
    assert "tpu_custom_call" in found.hlo  # attention is the kernel, as on the chip
    assert sorted(found.mesh_ids) == [0, 1, 2, 3]
    assert 0 < found.child_peak_bytes < 3 * 2**30
    assert tpu_plan.collectives
    assert all(c.count > 0 for c in tpu_plan.collectives)
    assert 0 < tpu_plan.time.low_s <= tpu_plan.time.step_s <= tpu_plan.time.high_s


@needs_libtpu
def test_json_has_the_contract(tpu_plan):
    found = json.loads(json.dumps(tpu_plan.to_json(), allow_nan=False))
    keys = [
        "fits",
        "exit_reason",
        "target",
        "layout",
        "parameters",
        "memory",
        "time",
        "collectives",
        "pipeline",
        "advice",
        "versions",
    ]
    assert not set(keys) - set(found)
    sizes = [
        "capacity_bytes",
        "peak_bytes",
        "argument_bytes",
        "temp_bytes",
        "alias_bytes",
        "host_bytes",
        "components",
    ]
    assert not set(sizes) - set(found["memory"])
    assert sum(found["memory"]["components"].values()) > 0
    times = [
        "step_s",
        "low_s",
        "high_s",
        "mfu_causal",
        "mfu_full",
        "hfu",
        "tokens_per_s_per_chip",
        "waterfall",
    ]
    assert not set(times) - set(found["time"])
    assert not {"kind", "axis", "bytes", "count", "asynchronous", "link"} - set(
        found["collectives"][0]
    )
    assert {type(one["link"]) for one in found["collectives"]} == {str}
    assert found["versions"]["jax"] == jax.__version__
    assert found["target"] == "v5e:2x2"
    assert "MFU causal" in show.as_text(found)
    unknown = found | {
        "time": found["time"] | dict.fromkeys(("mfu_causal", "mfu_full", "hfu"))
    }  # as for float32
    assert "MFU unknown" in show.as_text(unknown)


@needs_libtpu
def test_the_same_step_is_compiled_once(tpu_plan, cache):
    assert not tpu_plan.compiled.cached
    longer = dataclasses.replace(
        tpu_plan.run, train=dataclasses.replace(tpu_plan.run.train, log_every=3)
    )
    again = compile_run(longer, tpu_plan.target, CompileOptions(cache=cache))
    assert again.cached
    assert again.hlo == tpu_plan.compiled.hlo
    assert again.peak_bytes == tpu_plan.compiled.peak_bytes


@needs_libtpu
def test_what_does_not_fit_says_by_how_much_and_what_to_do(home, capsys):
    code = plan.main(
        [
            "--config",
            "llama3_8b",
            "--on",
            "v5e:4x4",
            "--json",
            "--workdir",
            str(home / "run"),
        ]
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 3
    assert found["fits"] is False
    assert (
        found["memory"]["peak_bytes"]
        > found["memory"]["capacity_bytes"]
        == 15.75 * 2**30
    )
    assert len(found["advice"]) >= 3
    assert all(edit["words"] for edit in found["advice"])
    # what a run may change without another plan
    assert "train.steps" in found["outside_step"]
    assert json.loads((home / "run" / "plan.json").read_text()) == found


def test_figures_name_their_compiler_and_the_plan_another():
    figures = observed.TABLE["v5e"].sure
    assert "libtpu 0.0.42.1" in figures
    assert compiled_step.other_compiler(figures, "tpu", {"libtpu": "0.0.42.1"}) == ""
    assert "compiled by libtpu 0.0.50.1" in compiled_step.other_compiler(
        figures, "tpu", {"libtpu": "0.0.50.1"}
    )
    cuda = {"jax-cuda13-plugin": "0.11.2"}
    assert "jax-cuda13-plugin 0.11.2" in compiled_step.other_compiler(
        observed.TABLE["gpu"].sure, "gpu", cuda
    )
    assert not compiled_step.other_compiler("unknown", "cpu", cuda)


def test_checkpoints_and_failures_are_arithmetic():
    run, target = (
        run_of(TINY | {"checkpoint.every_steps": "100"}),
        targets.parse("v5p:2x2x4"),
    )
    composition = plan_by_arithmetic(run, target).composition  # fsdp 16, on 4 hosts
    assumed = restarts.Assumptions(
        chip_hours_per_failure=160, host_storage_bytes_per_s=1e9
    )
    known = {"assumed": assumed, "compile_s": 50.0}
    found = restarts.estimate(
        composition, target, 240 * 10**9, 15 * 10**9, step_s=2.0, **known
    )
    # 15 GB/s to the host
    assert found.device_bytes == 15e9
    assert found.blocking_s == pytest.approx(1.0)
    assert found.write_s == pytest.approx(60)
    assert found.restart_s == pytest.approx(60 + 50)
    assert found.mtbf_s == pytest.approx(10 * 3600)
    assert found.every_steps == pytest.approx(found.interval_s / 2, abs=1)
    assert 200 < found.interval_s < 300
    assert 0 < found.lost_share < found.configured_lost_share + 1e-3 < 0.05

    def estimate(**checkpoint):
        changed = dataclasses.replace(
            run, checkpoint=dataclasses.replace(run.checkpoint, **checkpoint)
        )
        return restarts.estimate(
            dataclasses.replace(composition, config=changed),
            target,
            240 * 10**9,
            15 * 10**9,
            step_s=2.0,
            **known,
        )

    assert estimate(asynchronous=False).blocking_s == 61
    # Each save waits 30 s (patience_s) for the one before, of 60 s.
    assert estimate(every_steps=10).configured_lost_share > 30 / 51
    # The config's hours count, but for those of the command line.
    own = {"interval": "auto", "chip_hours_per_failure": 80.0}
    assert estimate(**own).mtbf_s == found.mtbf_s
    known["assumed"] = restarts.Assumptions(host_storage_bytes_per_s=1e9)
    assert estimate(**own).mtbf_s == pytest.approx(5 * 3600)
    assert estimate().mtbf_s > 1e6
    unknown = restarts.estimate(composition, target, 1, 1, step_s=None, **known)
    assert unknown.every_steps is unknown.configured_lost_share is None


@pytest.mark.parametrize(
    ("on", "mesh", "device", "write", "read"),
    [
        # a host reads once what its devices hold alike
        ("h100:1x8", {"data": 8}, 96, 96, 96),
        # weights whole on each device
        ("h100:1x8", {"fsdp": 8, "zero": 1}, 40, 96, 96),
        ("h100:8x8", {"data": 8, "fsdp": 8}, 1.5, 12, 96),  # all hosts write
        ("h100:8x8", {"data": 8, "pipeline": 8}, 1.5, 12, 12),  # a stage a host
        # 36 machines in two racks
        ("gb200:2x72", {"data": 36, "fsdp": 4}, 96 / 144, 96 / 36, 96),
    ],
)
def test_who_writes_and_reads_a_checkpoint(on, mesh, device, write, read):
    sizes = {
        f"mesh.{name}": str(size)
        for name, size in ({"data": 1, "fsdp": 1} | mesh).items()
    }
    words = ["--config=llama3_8b", "--config.batch.global_size=9216"]
    words += [f"--config.{name}={value}" for name, value in sizes.items()]
    _, run = cli.parse(cli.ConfigParser("test", None), words)
    found = plan_by_arithmetic(run, targets.parse(on)).to_json()["restarts"]
    # 12 bytes of each weight
    assert found["checkpoint_bytes"] == pytest.approx(96.4e9, rel=1e-3)
    # in docs/reference/plan-json.md
    promised = (
        "blocking_s mtbf_s interval_s every_steps lost_share configured_lost_share"
    )
    assert not set(promised.split()) - set(found)
    seen = found["device_bytes"] / 1e9, found["write_s"], found["restart_s"]
    assert seen == pytest.approx((device, write, read), rel=0.02)


MIB = 2**20
# MiB as libtpu 0.0.42.1 and 0.0.50.1 give them for small programs on v5e:2x2:
# arguments, output, alias, temp, host arguments, host temp, peak; and the peak on the
# device.
HOST_SIZES = [
    ((512, 512, 512, 0, 0, 0, 512), 512),
    ((256, 256, 256, 32, 256, 0, 544), 288),  # half of the state on the host
    ((40, 32, 0, 128, 0, 0, 200), 200),
    ((40, 32, 0, 8, 0, 256, 328), 80),  # activations on the host
    ((12 * 1024, 0, 0, 6 * 1024, 0, 256, 12 * 1024), 15.75 * 1024),  # taken, so it fits
]


@pytest.mark.parametrize(("sizes", "peak"), HOST_SIZES)
def test_what_is_on_the_host_is_no_part_of_a_devices_peak(sizes, peak):
    names = ("argument", "output", "alias", "temp", "host_argument", "host_temp")
    found = {
        f"{name}_size_in_bytes": size * MIB
        for name, size in zip(names, sizes[:-1], strict=True)
    }
    analysis = SimpleNamespace(**found, peak_memory_in_bytes=sizes[-1] * MIB)
    assert (
        worker._sizes(analysis, targets.parse("v5e:2x2"), state_on_host=0)["peak_bytes"]
        == peak * MIB
    )


# GiB as XLA for CUDA gives them for llama3_8b on h100:1x8: arguments, temp, host temp,
# peak; on the device.
@pytest.mark.parametrize(
    "sizes", [(11.25, 32.5, 72, 83.25, 43.75), (11.25, 18.25, 16, 29.5, 29.5)]
)
def test_a_gpus_peak_is_that_of_the_device_where_more_lies_on_the_host(sizes):
    arguments, temp, host, peak, on_device = (int(size * 1024) * MIB for size in sizes)
    empty = dict.fromkeys(
        ("output_size_in_bytes", "alias_size_in_bytes", "host_argument_size_in_bytes"),
        0,
    )
    found = {
        "argument_size_in_bytes": arguments,
        "temp_size_in_bytes": temp,
        "host_temp_size_in_bytes": host,
    }
    analysis = SimpleNamespace(**empty, **found, peak_memory_in_bytes=peak)
    assert (
        worker._sizes(analysis, targets.parse("h100:1x8"), state_on_host=0)[
            "peak_bytes"
        ]
        == on_device
    )


@pytest.mark.slow
def test_two_plans_at_once(cache):
    run, target = run_of(SMALLEST), targets.parse("cpu:2")
    options = CompileOptions(cache=cache / "two", flags=(*QUICKLY, ("xla_nope", True)))
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: compile_run(run, target, options), range(2))
    assert first.hlo == second.hlo != ""
    assert first.mesh_ids == (0, 1)
    for found in (first, second):  # a flag that is refused is left out, and said
        assert any(
            "xla_nope: this compiler does not know" in note for note in found.notes
        )
    (entry,) = (cache / "two").iterdir()
    assert compiler.read_entry(entry)["hlo"] == first.hlo
    entry.write_bytes(b"torn")
    assert compiler.read_entry(entry) is None  # made again, then


def test_a_child_over_its_caps_is_no_verdict(cache):
    run, target = run_of(SMALLEST), targets.parse("cpu:2")
    small = make_plan(
        run, target, options=CompileOptions(cache=cache, memory_bytes=2**20)
    )
    assert small.exit_code == 4
    assert "GiB of this machine's memory" in small.exit_reason
    assert small.fits is None
    with pytest.raises(CannotTell, match=r"more than 0\.3 s"):
        compile_run(run, target, CompileOptions(cache=cache, timeout_s=0.3))


def test_the_limit_ends_a_plan(home, capsys):
    words = ["--on", "cpu:2", "--limit", "0.001", "--json"]
    assert plan.main([*flags(SMALLEST), *words]) == 4
    captured = capsys.readouterr()
    reason = json.loads(captured.out)["exit_reason"]
    assert reason.startswith("the compiler took more than 0.06 s; --limit sets")
    assert "by arithmetic" in captured.err


def test_a_child_that_dies_is_no_verdict(cache, monkeypatch):
    program = (
        "import os, sys; print('last words', file=sys.stderr, flush=True); os.abort()"
    )
    popen = compiler.subprocess.Popen
    monkeypatch.setattr(
        compiler.subprocess,
        "Popen",
        lambda command, **more: popen([*command[:1], "-c", program], **more),
    )
    found = make_plan(
        run_of(SMALLEST), targets.parse("cpu:2"), options=CompileOptions(cache=cache)
    )
    assert found.exit_code == 4
    assert "ended by signal 6" in found.exit_reason
    assert "last words" in found.exit_reason


def test_a_bad_target_lists_the_legal_ones(capsys):
    with pytest.raises(ConfigError, match="v5p"):
        plan.main([*flags(TINY), "--on", "v9z:4"])
    with pytest.raises(ConfigError, match="mesh.fsdp=3|needs 3 devices|mesh: fsdp 3"):
        plan.main([*flags(TINY | {"mesh.fsdp": "3"}), "--on", "v5e:2x2"])


@pytest.mark.parametrize(("on", "extra"), [("v5e:2x2", "aot"), ("h100:1x8", "aot-gpu")])
def test_a_missing_compiler_names_the_extra(on, extra, monkeypatch):
    for module in (
        "jaxdist.config.extras.find_spec",
        "jaxdist.planner.compiler.find_spec",
    ):
        monkeypatch.setattr(module, lambda name: None)
    with pytest.raises(MissingExtra, match=rf"pip install .*\[{extra}\]"):
        plan.main([*flags(SMALLEST), "--on", on])


@needs_libtpu
def test_versions_that_do_not_belong_together_are_named(monkeypatch):
    assert not list(compiler.check_versions("tpu"))
    real = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: "0.0.1" if n == "libtpu" else real(n)
    )
    (line,) = compiler.check_versions("tpu")
    assert "libtpu 0.0.1" in line
    assert "pip install" in line


def test_flags_are_those_of_train_and_the_users_win():
    name = "xla_tpu_enable_data_parallel_all_reduce_opt"
    v5e = targets.parse("v5e:2x2")
    plain, notes = compiler_flags(v5e, CompileOptions(), {})
    assert not notes
    assert not any("sparse_core" in flag for flag in plain)
    assert plain[name] is True
    assert plain[observed.WINDOWED_EINSUM] == "1000000"
    own = {"LIBTPU_INIT_ARGS": f"--{name}=false --xla_tpu_scoped_vmem_limit_kib=98304"}
    mine, _ = compiler_flags(v5e, CompileOptions(flags=(("x", 1),)), own)
    assert mine[name] is False
    assert mine["xla_tpu_scoped_vmem_limit_kib"] == "98304"
    assert mine["x"] == 1
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    gpu, _ = compiler_flags(targets.parse("h100"), CompileOptions(), environ)
    assert gpu == {"xla_gpu_enable_latency_hiding_scheduler": True}


def test_a_plan_is_compiled_with_the_flags_of_the_chips_family():
    offload = "xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter"
    v5p = targets.parse("v5p:4x4x4")
    flags, notes = compiler_flags(v5p, CompileOptions(), {})
    assert flags[offload] is True
    assert not notes
    # A process starts with it, but no compilation takes it: ours is left out in
    # silence, the user's is named.
    assert "xla_sc_disjoint_spmem" not in flags
    flags, notes = compiler_flags(
        v5p, CompileOptions(), {"LIBTPU_INIT_ARGS": "--xla_sc_disjoint_spmem=true"}
    )
    assert "xla_sc_disjoint_spmem" not in flags
    assert offload not in flags
    assert len(notes) == 2
    assert "left to you" in notes[0]
    assert "planned without it" in notes[1]


def test_arithmetic_alone_knows_layout_and_parameters():
    run = run_of(
        TINY | {"mesh.fsdp": "8", "mesh.pipeline": "2", "batch.global_size": "64"}
    )
    found = plan_by_arithmetic(run, targets.parse("v5p:2x2x4"))
    assert found.composition.spec.parameter_count > 0
    assert found.composition.shape.sizes["fsdp"] == 8
    assert found.pipeline["schedule"] == "1f1b"
    assert 0 < found.pipeline["bubble"] < 1
    assert found.fits is None
    assert found.compiled is None


@pytest.mark.parametrize("family", ["t4", "v100"])
def test_a_plan_warns_of_bfloat16_before_it_compiles(family, monkeypatch):
    said = []

    def compile_late(*_, **__):
        assert said
        raise CannotTell("nothing was compiled")

    monkeypatch.setattr(plan_module, "compile_run", compile_late)
    one = {"mesh.fsdp": "1", "batch.global_size": "4"}
    target = targets.parse(f"{family}:1x1")
    found = make_plan(run_of(TINY | one), target, say=said.append)
    (line,) = found.warnings
    assert line.startswith(f"precision.compute=bfloat16: {target.device_kind} has no")
    assert "set precision.compute=float16" in line
    assert said[0] == f"warning: {line}"
    half = run_of(TINY | one | {"precision.compute": "float16"})
    assert plan_by_arithmetic(half, target).warnings == []
    assert plan_by_arithmetic(run_of(TINY | one), targets.parse("l4")).warnings == []


def test_an_assembler_that_knows_no_v100_is_told_with_its_cure(tmp_path):
    error = "JaxRuntimeError: UNIMPLEMENTED: /usr/local/bin/ptxas ptxas too old."
    with pytest.raises(CannotTell, match="pip install nvidia-cuda-nvcc-cu12"):
        compiler._raise_error({"error": error}, tmp_path)


def test_train_explains_a_shortage_of_memory(monkeypatch, capsys, tmp_path):
    def out_of_memory(*args, **more):
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes"
        )

    monkeypatch.setattr(training, "run", out_of_memory)
    assert train.main([*flags(TINY), "--workdir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "allocating 7 bytes" in said
    assert "parameters" in said
    assert os.environ.get("JAX_PLATFORMS") == "cpu"


@pytest.mark.slow
@needs_libtpu
def test_llama3_8b_fits_a_v5p_slice(home, capsys):
    assert plan.main(["--config", "llama3_8b", "--on", "v5p:4x4x4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    state = 12 * found["parameters"] / 64
    assert found["memory"]["argument_bytes"] == pytest.approx(state, rel=0.01)
    assert found["memory"]["alias_bytes"] == pytest.approx(state, rel=0.01)


needs_cuda_compiler = pytest.mark.skipif(
    not any(find_spec(f"jax_{name}_plugin") for name in ("cuda12", "cuda13")),
    reason='needs the CUDA compiler: pip install -e ".[aot-gpu]"',
)


@pytest.mark.slow
@needs_cuda_compiler
def test_a_70b_base_in_4_bits_fits_one_gpu(home, capsys):
    words = ["--config", "llama3_70b:qlora", "--config.init.required=false"]
    assert plan.main([*words, "--on", "h100:1x1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["argument_bytes"] > 70e9 / 2  # all codes are there
    assert found["memory"]["peak_bytes"] < found["memory"]["capacity_bytes"] < 80e9


@pytest.mark.slow
@needs_cuda_compiler
def test_gpus_are_compiled_for_without_one(cache):
    found = make_plan(
        run_of(TINY), targets.parse("h100:1x8"), options=CompileOptions(cache=cache)
    )
    assert found.fits
    assert found.compiled.peak_bytes < found.capacity_bytes < 0.93 * 80e9
