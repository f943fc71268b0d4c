"""Step times: sums checked by hand on small programs, kernels and parts on trimmed real
ones.
"""

import dataclasses
import functools
import operator
import re

import pytest

from jaxdist.config import files
from jaxdist.parallel import mesh
from jaxdist.planner import communication, compiled_step, plan, targets, timing
from jaxdist.planner.compiler import Compiled
from jaxdist.telemetry import hlo
from jaxdist.trainer import run_config
from support.paths import CONFIGS, HLO
from support.stored_programs import CASES, read

V5E = targets.parse("v5e:16x16")


def cycles(count):
    return f'backend_config={{"window_config":{{"estimated_cycles":"{count}"}}}}'


PROGRAM = f"""HloModule test

%inside (a: f32[]) -> f32[] {{
  ROOT %a = f32[] parameter(0), {cycles(7777)}
}}

%inner (state: s32[]) -> s32[] {{
  %state = s32[] parameter(0)
  ROOT %work = s32[] add(%state, %state), {cycles(1000)}
}}

%condition2 (state: s32[]) -> pred[] {{
  %limit = s32[] constant(5)
}}

%outer (state: s32[]) -> s32[] {{
  %state = s32[] parameter(0)
  %fused = s32[] fusion(%state), kind=kLoop, calls=%inside, {cycles(300)}
  %offloaded = s32[] fusion(%state), kind=kCustom, calls=%inside, {cycles(9223372036854775807)}
  ROOT %loop2 = s32[] while(%state), condition=%condition2, body=%inner
}}

%condition1 (state: s32[]) -> pred[] {{
  %limit = s32[] constant(4)
}}

%cheap (x: s32[]) -> s32[] {{
  ROOT %x = s32[] copy(%x), {cycles(10)}
}}

%dear (x: s32[]) -> s32[] {{
  ROOT %x = s32[] copy(%x), {cycles(50000)}
}}

ENTRY %main (p: s32[]) -> s32[] {{
  %p = s32[] parameter(0)
  %which = pred[] constant(false)
  %branch = s32[] conditional(%which, %p, %p), true_computation=%cheap, false_computation=%dear
  ROOT %loop1 = s32[] while(%p), condition=%condition1, body=%outer
}}
"""


def estimate(module, found=(), target=V5E, **options):
    given = {"tokens": 1e6, "flops_per_token": {"causal": 1e9, "full": 2e9}} | options
    kernels = timing.kernels(module)
    found = timing.overlap(module, found, kernels, target)
    return timing.estimate(module, found, kernels, target, **given)


def collective(**changes):
    one = communication.Collective(
        kind="all-gather",
        axis="fsdp",
        group_size=2,
        dtype="bf16",
        bytes=2 * 10**9,
        count=1,
        asynchronous=False,
        in_loop=False,
        what="activations",
        module="",
        phase="forward",
        name="gather",
        computation="main",
        begins=0,
        ends=0,
        link=targets.Link("ICI", 1e9),
    )
    return dataclasses.replace(one, **changes)


# --- compute --------------------------------------------------------------------------


def test_cycles_are_summed_over_loops_and_the_dearest_branch_and_not_inside_fusions():
    module = hlo.parse(PROGRAM)
    total = 50000 + 4 * (300 + 5 * 1000)
    assert module.cycles(module.entry) == total
    found = estimate(module)
    assert found.low_s == found.step_s == found.high_s == pytest.approx(total / 1.5e9)
    assert found.waterfall["attention"] == 0
    assert found.notes == ()


def test_loops_of_unknown_length_are_noted():
    module = hlo.parse(PROGRAM.replace("s32[] constant(5)", "s32[] parameter(1)"))
    assert estimate(module).notes == (
        "loops of unknown length were counted once: loop2",
    )


def test_windowed_products_are_noted():
    permute = collective(kind="collective-permute", in_loop=True, asynchronous=True)
    assert estimate(hlo.parse(PROGRAM), [permute] * 7).notes == ()
    (note,) = estimate(hlo.parse(PROGRAM), [permute] * 8).notes
    assert "windowed" in note
    assert (
        estimate(
            hlo.parse(PROGRAM), [dataclasses.replace(permute, axis="pipeline")] * 8
        ).notes
        == ()
    )


def test_a_cpu_has_no_time_and_says_so():
    found = estimate(hlo.parse(PROGRAM), target=targets.parse("cpu:8"))
    assert found.step_s is found.mfu_causal is found.band_s is found.days(1e9) is None
    assert found.sure.startswith("unknown")


def test_conventions_rates_and_costs():
    found = estimate(hlo.parse(PROGRAM))
    peak, rate = 197e12, 1e6 / found.step_s
    assert found.tokens_per_s == pytest.approx(rate)
    assert found.tokens_per_s_per_chip == pytest.approx(rate / 256)
    assert found.mfu_causal == pytest.approx(rate * 1e9 / 256 / peak)
    assert found.mfu_full == pytest.approx(2 * found.mfu_causal)
    assert found.days(rate * 86400 * 3) == pytest.approx(3)


GPU_PRODUCTS = """HloModule test

%gemm (a: f8e4m3fn[8192,4096], b: f8e4m3fn[4096,8192]) -> bf16[8192,8192] {
  %a = f8e4m3fn[8192,4096]{1,0} parameter(0)
  %b = f8e4m3fn[4096,8192]{1,0} parameter(1)
  ROOT %dot = bf16[8192,8192]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f8e4m3fn[8192,4096], w: f8e4m3fn[4096,8192]) -> bf16[8192,8192] {
  %x = f8e4m3fn[8192,4096]{1,0} parameter(0)
  %w = f8e4m3fn[4096,8192]{1,0} parameter(1)
  %u = bf16[8192,4096]{1,0} parameter(2)
  %v = bf16[4096,8192]{1,0} parameter(3)
  %codes = bf16[8192,8192]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm
  ROOT %other = bf16[8192,8192]{1,0} dot(%u, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_products_of_8_bit_floats_are_counted_at_their_peak_and_the_others_at_theirs():
    h100, one = targets.parse("h100:1x1"), 2 * 8192 * 4096 * 8192
    time = estimate(hlo.parse(GPU_PRODUCTS), target=h100)
    half, byte = (one / h100.chip.peak(name) for name in ("bfloat16", "float8"))
    assert byte == pytest.approx(half / 2, rel=1e-3)
    assert time.low_s == pytest.approx((half + byte / 0.95) / 0.79)
    assert time.high_s == pytest.approx((half + byte / 0.95) / 0.64)
    in_half = estimate(hlo.parse(GPU_PRODUCTS.replace("f8e4m3fn", "bf16")), target=h100)
    assert in_half.low_s == pytest.approx(2 * half / 0.79)


def test_a_layer_of_a_stack_is_read_and_not_the_stack():
    def seconds(slice_of: str) -> float:
        text = f"""HloModule test

%codes (stack: f32[28,3072,8192], i: s32[]) -> f8e4m3fn[8192,1,3072] {{
  %stack = f32[28,3072,8192]{{1,0,2}} parameter(0)
  %seen = f32[8192,28,3072]{{2,1,0}} {slice_of}(%stack)
  %i = s32[] parameter(1)
  %layer = f32[8192,1,3072]{{2,1,0}} dynamic-slice(%seen, %i, %i, %i), dynamic_slice_sizes={{8192,1,3072}}
  ROOT %convert = f8e4m3fn[8192,1,3072]{{2,1,0}} convert(%layer)
}}

ENTRY %main (stack: f32[28,3072,8192], i: s32[]) -> f8e4m3fn[8192,1,3072] {{
  %stack = f32[28,3072,8192]{{1,0,2}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %fusion = f8e4m3fn[8192,1,3072]{{2,1,0}} fusion(%stack, %i), kind=kLoop, calls=%codes
}}
"""
        return estimate(hlo.parse(text), target=targets.parse("h100:1x1")).low_s

    layer = 3072 * 8192
    assert seconds("bitcast") == pytest.approx(
        (4 + 1) * layer / (3350e9 * 0.92), rel=1e-3
    )
    assert seconds("transpose") == pytest.approx(
        (28 * 4 + 1) * layer / (3350e9 * 0.92), rel=1e-3
    )


def test_shares_of_peak_are_of_the_peak_that_is_given():
    h100 = targets.parse("h100:1x1")
    time, byte = (
        estimate(hlo.parse(GPU_PRODUCTS), target=h100, **p)
        for p in ({}, {"peak": "float8"})
    )
    assert (time.peak_dtype, time.peak_flops_per_s) == (
        "bfloat16",
        h100.chip.peak("bfloat16"),
    )
    assert (byte.peak_dtype, byte.peak_flops_per_s) == (
        "float8",
        h100.chip.peak("float8"),
    )
    for name in ("mfu_causal", "mfu_full", "hfu"):
        assert getattr(byte, name) == pytest.approx(getattr(time, name) / 2, rel=1e-3)
    older = estimate(
        hlo.parse(GPU_PRODUCTS), target=targets.parse("a100:1x1"), peak="float8"
    )
    assert older.mfu_causal is older.peak_flops_per_s is None
    assert older.step_s > 0


# --- communication --------------------------------------------------------------------


def test_low_middle_and_high():
    # 0.1 of 0.2 us
    covered = collective(
        asynchronous=True, bytes=200, ends=2, computation="outer", count=4
    )
    uncovered = collective(asynchronous=True, count=2)
    found = [collective(count=3), uncovered, covered]  # 1 s each, but for the covered
    time = estimate(hlo.parse(PROGRAM), found)
    assert time.step_s - time.low_s == pytest.approx(3 + 2)
    assert time.high_s - time.step_s == pytest.approx(4e-7) == time.hidden_s
    assert time.band_s == (
        pytest.approx(0.95 * time.low_s),
        pytest.approx(1.05 * time.high_s),
    )
    assert sum(time.waterfall.values()) == pytest.approx(time.step_s)
    assert time.waterfall["exposed communication"] == pytest.approx(5)
    assert time.uncovered_s == pytest.approx(2)


def test_one_window_hides_only_as_much_as_its_compute():
    second = cycles(int(1.5e9))
    text = f"""HloModule test

ENTRY %main (p: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %work = f32[] copy(%p), {second}
  ROOT %more = f32[] copy(%work), {second}
}}
"""
    module = hlo.parse(text)
    between = {"asynchronous": True, "begins": 0, "ends": 2}  # around %work: 1 s
    first = collective(bytes=int(1.6e9), **between)  # 0.8 s
    assert estimate(module, [first]).hidden_s == pytest.approx(0.8)
    both = estimate(module, [first, dataclasses.replace(first, name="other")])
    assert both.hidden_s == pytest.approx(1.0)
    assert both.uncovered_s == pytest.approx(0.6)
    assert both.step_s - both.low_s == pytest.approx(0.6)
    other_link = dataclasses.replace(first, link=targets.Link("DCN", 1e9))
    assert estimate(module, [first, other_link]).hidden_s == pytest.approx(1.6)


def test_what_is_wholly_hidden_leaves_nothing():
    text = f"""HloModule test

ENTRY %main (p: f32[]) -> f32[] {{
  %p = f32[] parameter(0)
  %work = f32[] copy(%p), {cycles(int(1.5e9))}
  ROOT %more = f32[] copy(%work), {cycles(1)}
}}
"""
    # 0.1 s: ten sum to 1 - 1e-16
    short = collective(bytes=int(0.2e9), asynchronous=True, begins=0, ends=2)
    time = estimate(
        hlo.parse(text), [dataclasses.replace(short, name=str(i)) for i in range(10)]
    )
    # as sum() adds before Python 3.12
    one_by_one = functools.reduce(operator.add, [0.1] * 10)
    assert one_by_one < 1
    assert time.hidden_s == pytest.approx(1)
    assert time.uncovered_s == 0


def test_the_low_end_takes_fused_backward_products_at_the_rate_of_single_ones():
    product = "f32[4096,4096] convolution(%a, %a), dim_labels=bf_io->bf"
    stack = 'metadata={op_name="jit(step)/transpose(jvp())/dot_general"}'

    def program(op_name: str) -> str:
        return f"""HloModule test

%inside (a: f32[4096,4096]) -> f32[4096,4096] {{
  %a = f32[4096,4096] parameter(0)
  ROOT %product = {product}
}}

ENTRY %main (p: f32[4096,4096]) -> f32[4096,4096] {{
  %p = f32[4096,4096] parameter(0)
  ROOT %fused = f32[4096,4096] fusion(%p), kind=kOutput, calls=%inside, {op_name}, {cycles(int(1.5e7))}
}}
"""

    found = estimate(hlo.parse(program(stack)))
    assert found.step_s == pytest.approx(0.010)  # as the compiler counts
    assert found.low_s == pytest.approx(2 * 4096**3 / (0.98 * 197e12))
    (note,) = found.notes
    assert "93% of the step" in note
    assert "backward matmuls" in note
    forward = estimate(hlo.parse(program(stack.replace("transpose(jvp())", "jvp()"))))
    again = estimate(
        hlo.parse(
            program(stack.replace("dot_general", "rematted_computation/dot_general"))
        )
    )
    assert forward.low_s == again.low_s == pytest.approx(0.010)
    assert forward.notes == again.notes == ()


def test_a_real_gather_is_hidden_by_its_matmul():
    target, _ = CASES["v5e_fsdp256"]
    module = hlo.parse((HLO / "v5e_fsdp256.txt").read_text())
    found = read("v5e_fsdp256")
    gather = found["async-collective-start"]
    assert gather.asynchronous
    assert gather.wire_s > 0
    time = estimate(module, list(found.values()), targets.parse(target))
    assert time.hidden_s == pytest.approx(gather.step_s)
    assert time.uncovered_s == 0


# --- attention ------------------------------------------------------------------------


def test_kernels_of_a_real_step_are_counted():
    module = hlo.parse((HLO / "v5e_fsdp256.txt").read_text())
    kernels = timing.attention_kernels(module)
    # 6 sequences and 64 heads a device, causal
    forward = 2 * 2 * 6 * 64 * 2048 * 2048 * 128 / 2
    expected = [("forward", 1), ("forward", 1), ("dq", 1.5), ("dkv", 2.0)]
    roles = sorted((k.role, k.flops / forward) for k in kernels)
    assert roles == sorted(expected)
    assert {k.count for k in kernels} == {32}
    assert {k.width for k in kernels} == {128}
    assert timing.forwards_per_backward(kernels) == 2  # full remat
    attention = 32 * 5.5 * forward / (0.5 * 197e12)
    compute = module.cycles(module.entry) / 1.5e9
    assert estimate(module).low_s == pytest.approx(compute + attention)


def test_a_fused_backward_kernel_costs_less_than_two():
    text = (HLO / "v5e_fsdp256.txt").read_text()
    lines = [
        line for line in text.splitlines() if not line.startswith("  %splash_mha_dq")
    ]
    assert len(lines) == len(text.splitlines()) - 1
    kernels = timing.attention_kernels(hlo.parse("\n".join(lines)))
    forward, backward = (
        next(k for k in kernels if k.role == role) for role in ("forward", "dkv")
    )
    assert backward.flops == 2.5 * forward.flops


def test_queries_that_see_all_keys_cost_twice_a_triangle():
    text = (HLO / "v5e_fsdp256.txt").read_text()
    marked = re.sub(r'(splash_mha_fwd.*op_name=")', r"\1all_keys/", text)
    before, after = (timing.attention_kernels(hlo.parse(one)) for one in (text, marked))
    ratios = {(a.role, b.flops / a.flops) for a, b in zip(before, after, strict=True)}
    assert ratios == {("forward", 2), ("dq", 1), ("dkv", 1)}


def test_blocks_of_keys_in_one_call_are_all_charged():
    text = (HLO / "v5e_fsdp256.txt").read_text()
    marked = re.sub(r'(splash_mha_dkv.*op_name=")', r"\1all_keys/key_blocks_4/", text)
    before, after = (timing.attention_kernels(hlo.parse(one)) for one in (text, marked))
    ratios = {(a.role, b.flops / a.flops) for a, b in zip(before, after, strict=True)}
    # 4 times as many, and all of them seen
    assert ratios == {("forward", 1), ("dq", 1), ("dkv", 8)}


def test_the_last_part_of_the_queries_is_charged():
    """That of a sequence split over 2 devices sees all keys but a quarter of its
    rectangle.
    """
    text = (HLO / "v5e_fsdp256.txt").read_text()
    halved, count = re.subn(r"(%fusion.348 = bf16\[6,64,)2048", r"\g<1>1024", text)
    assert count == 1  # the queries of three kernels
    before, after = (timing.attention_kernels(hlo.parse(one)) for one in (text, halved))
    ratios = sorted(b.flops / a.flops for a, b in zip(before, after, strict=True))
    assert ratios == pytest.approx([0.75, 0.75, 0.75, 1])


def test_narrow_heads_fill_half_of_wide_matrix_units():
    module = hlo.parse((HLO / "v5e_fsdp256.txt").read_text())
    attention = sum(k.count * k.flops for k in timing.attention_kernels(module))
    compute = module.cycles(module.entry) / 1.75e9
    time = estimate(module, target=targets.parse("v6e:16x16"))
    assert time.low_s == pytest.approx(compute + attention / (0.25 * 918e12))


def test_kernels_of_cudnn():
    module = hlo.parse((HLO / "h100_4x8.txt").read_text())
    kernels = timing.attention_kernels(module)
    forward = 2 * 2 * 8 * 8 * 8192 * 8192 * 128 / 2  # 8 sequences, 8 of 32 heads
    assert sorted((k.role, k.flops / forward) for k in kernels) == [
        ("backward", 2.5),
        ("forward", 1),
        ("forward", 1),
    ]


def test_other_kernels_are_named():
    text = (HLO / "v5e_fsdp256.txt").read_text()
    text = re.sub(
        r"splash_mha_fwd_residuals.2 = (.*?)op_name=\"[^\"]*\"",
        r"mine = \1op_name=\"x\"",
        text,
    )
    assert "%mine = " in text
    assert estimate(hlo.parse(text)).notes == (
        "kernels of unknown cost were omitted: mine",
    )


# --- experts --------------------------------------------------------------------------


def products_of(scope: str) -> str:
    """Returns a product of 1024 rows with 4 kernels, and a kernels' gradient, in row
    tiles of 128.
    """
    name = f'metadata={{op_name="jit(step)/shard_map/{scope}jit(gmm)/pallas_call"}}'
    call = "custom-call(%%tiles, %%offsets, %%groups, %%rows, %%first, %%x, %%%s)"
    call += f', custom_call_target="tpu_custom_call", {name}'
    return f"""HloModule test

ENTRY %main (x: bf16[1024,256], w: bf16[4,256,512], dy: bf16[1024,512]) -> f32[4,256,512] {{
  %x = bf16[1024,256]{{1,0}} parameter(0)
  %w = bf16[4,256,512]{{2,1,0}} parameter(1)
  %dy = bf16[1024,512]{{1,0}} parameter(2)
  %tiles = s32[]{{:T(128)}} constant(8)
  %offsets = s32[5]{{0}} parameter(3)
  %groups = s32[11]{{0}} parameter(4)
  %rows = s32[11]{{0}} parameter(5)
  %first = s32[1]{{0}} parameter(6)
  %work = bf16[1024,256]{{1,0}} copy(%x), {cycles(int(1.75e6))}
  %gmm.2 = bf16[1024,512]{{1,0}} {call % "w"}
  ROOT %tgmm = f32[4,256,512]{{2,1,0}} {call % "dy"}
}}
"""


def test_grouped_products_are_charged_the_tiles_that_an_even_load_visits():
    module = hlo.parse(products_of(""))
    visited = (8 + 4 - 1) * 128  # every group but the first begins within a tile
    (product, gradient) = timing.expert_kernels(module)
    assert product.flops == gradient.flops == 2 * visited * 256 * 512
    time = estimate(module, target=targets.parse("v5p:4x4x4"))
    experts = 2 * product.flops / (0.8 * 459e12)
    assert time.low_s == time.step_s == pytest.approx(1e-3 + experts)
    shares = time.waterfall["experts"] / time.waterfall["compute"]
    assert shares == pytest.approx(experts / 1e-3)
    assert time.waterfall["attention"] == 0
    assert sum(time.waterfall.values()) == pytest.approx(time.step_s)
    assert time.notes == ("experts are counted with an even load",)


def test_element_wise_kernels_are_charged_their_bytes():
    text = products_of("").replace(
        "%work = bf16[1024,256]{1,0} copy(%x)",
        """%experts_hidden_gradients.1 = \
(bf16[1024,512]{1,0}, f32[1024,128]{1,0}) custom-call(%dy, %dy), custom_call_target="tpu_custom_call"
  %work = bf16[1024,256]{1,0} copy(%x)""",
    )
    v5p = targets.parse("v5p:4x4x4")
    more = (
        estimate(hlo.parse(text), target=v5p).step_s
        - estimate(hlo.parse(products_of("")), target=v5p).step_s
    )
    assert more == pytest.approx((3 * 1024 * 512 * 2 + 1024 * 128 * 4) / 0.72 / 2765e9)


def test_spare_rows_of_grouped_products_cost_nothing():
    module = hlo.parse(products_of("even_load_rows_x_1.25/"))
    # 819 rows: 7
    assert {k.flops for k in timing.expert_kernels(module)} == {
        2 * (7 + 3) * 128 * 256 * 512
    }


def test_loops_that_the_load_ends_go_round_as_often_as_an_even_load_needs():
    text = PROGRAM.replace("s32[] constant(5)", "s32[] parameter(1)")
    for trips in (0, 1):
        loop = f'body=%inner, metadata={{op_name="jit(step)/even_load_trips_{trips}/while"}}'
        time = estimate(hlo.parse(text.replace("body=%inner", loop)))
        assert time.step_s == pytest.approx((50000 + 4 * (300 + trips * 1000)) / 1.5e9)
        assert time.notes == ("experts are counted with an even load",)


# --- GPU ------------------------------------------------------------------------------

ROOFLINE = """HloModule test

%product (a: bf16[8192,8192], b: bf16[8192,8192]) -> bf16[8192,8192] {
  %a = bf16[8192,8192]{1,0} parameter(0)
  %b = bf16[8192,8192]{1,0} parameter(1)
  ROOT %dot = bf16[8192,8192]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%slice (stack: f32[32,4096,4096], i: s32[]) -> f32[1,4096,4096] {
  %stack = f32[32,4096,4096]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %cut = f32[1,4096,4096]{2,1,0} dynamic-slice(%stack, %i), dynamic_slice_sizes={1,4096,4096}
}

ENTRY %main (x: bf16[8192,8192], stack: f32[32,4096,4096], i: s32[]) -> f32[1,4096,4096] {
  %x = bf16[8192,8192]{1,0} parameter(0)
  %stack = f32[32,4096,4096]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %gemm = bf16[8192,8192]{1,0} fusion(%x, %x), kind=kCustom, calls=%product
  ROOT %layer = f32[1,4096,4096]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%slice
}
"""


def test_a_gpu_step_is_a_roofline_with_a_band():
    module = hlo.parse(ROOFLINE)
    time = estimate(module, target=targets.parse("h100:1x8"))
    # a slice is read, not the stack
    flops, traffic = 2 * 8192**3, 2 * 4096 * 4096 * 4 + 4
    assert time.low_s == pytest.approx(
        flops / (0.79 * 989.4e12) + traffic / (0.92 * 3350e9)
    )
    assert time.high_s == pytest.approx(
        flops / (0.64 * 989.4e12) + traffic / (0.75 * 3350e9)
    )
    assert time.low_s < time.step_s < time.high_s
    assert "roofline" in time.sure


def test_what_gpu_compute_does_not_cover_is_exposed():
    module = hlo.parse(ROOFLINE)
    target = targets.parse("h100:1x8")
    open_end = collective(asynchronous=True, begins=3, ends=3)
    time = estimate(module, [open_end], target)
    assert time.waterfall["exposed communication"] == pytest.approx(1.0)


# --- the parts of a step --------------------------------------------------------------


def test_recomputation_and_bubble_are_parts_of_the_step():
    module = hlo.parse((HLO / "v5e_fsdp256.txt").read_text())
    executed = estimate(module).hfu * estimate(module).step_s * 197e12
    useful = {"causal": 0.6 * executed * 256 / 1e6, "full": executed}
    time = estimate(module, flops_per_token=useful)
    assert time.waterfall["recompute"] == pytest.approx(0.4 * time.step_s)
    assert time.mfu_causal == pytest.approx(0.6 * time.hfu)
    piped = estimate(module, flops_per_token=useful, bubble=0.25)
    assert piped.step_s == time.step_s
    assert piped.waterfall["bubble"] == pytest.approx(0.25 * time.step_s)
    assert piped.waterfall["recompute"] == pytest.approx(0.15 * time.step_s)
    assert sum(piped.waterfall.values()) == pytest.approx(time.step_s)


def test_the_time_of_a_run_takes_its_sizes_from_the_config():
    run = run_config.from_config(files.load("dense_16b:tiny", folders=[CONFIGS]))
    batch = dataclasses.replace(run.batch, global_size=256)
    run = dataclasses.replace(run, batch=batch, mesh=mesh.MeshConfig(data=256))
    text = (HLO / "v5e_fsdp256.txt").read_text()
    sizes = dict.fromkeys(
        ("argument_bytes", "output_bytes", "alias_bytes", "temp_bytes", "peak_bytes"), 0
    )
    compiled = Compiled(
        **sizes, host_argument_bytes=0, host_temp_bytes=0, hlo=text, mesh_ids=()
    )
    time = compiled_step.with_compiled(plan.plan_by_arithmetic(run, V5E), compiled).time
    # no peak is published for it
    assert run.precision.compute == "float32"
    assert time.mfu_causal is None
    assert time.tokens_per_s == pytest.approx(256 * 128 / time.step_s)
    assert time.waterfall["bubble"] == 0
