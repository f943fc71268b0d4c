"""Collectives of compiled programs: real texts, trimmed, of each way that a compiler
spells them.

tests/hlo/*.txt are our own steps (dense_16b, llama3_8b) as libtpu 0.0.42.1 and the CUDA
plugin of jax 0.10.2 scheduled them (`_50`: libtpu 0.0.50.1), cut down to some
collectives and what they need.
"""

import dataclasses

import pytest

from jaxdist.planner import communication, targets
from jaxdist.telemetry import hlo
from support.paths import HLO
from support.stored_programs import mesh_shape, read


def program(body, *, trips=3):
    """Returns a module whose loop runs `body`, lines of instructions of f32[8,128]
    arrays %p and %x.
    """
    text = f"""HloModule test

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%body (state: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {{
  %state = (s32[], f32[8,128]) parameter(0)
  %x = f32[8,128]{{1,0}} get-tuple-element(%state), index=1
{body}
}}

%condition (state: (s32[], f32[8,128])) -> pred[] {{
  %state = (s32[], f32[8,128]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %limit = s32[] constant({trips})
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}}

ENTRY %main (p: f32[8,128]) -> f32[8,128] {{
  %p = f32[8,128]{{1,0}} parameter(0), metadata={{op_name="state.trainable['blocks']['mlp']['up']"}}
  %zero = s32[] constant(0)
  %init = (s32[], f32[8,128]) tuple(%zero, %p)
  %loop = (s32[], f32[8,128]) while(%init), condition=%condition, body=%body
  ROOT %out = f32[8,128]{{1,0}} get-tuple-element(%loop), index=1
}}
"""
    return hlo.parse(text)


def only(module, shape):
    (found,) = communication.collectives(module, shape)
    return found


# --- groups ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "axis", "size"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", "tensor", 2),
        ("{{0,2},{1,3},{4,6},{5,7}}", "fsdp", 2),
        ("{}", "data+fsdp+tensor", 8),
        ("[4,2]<=[8]", "tensor", 2),
        ("[2,4]<=[4,2]T(1,0)", "data+fsdp", 4),
        ("[2,4]<=[2,2,2]T(1,0,2)", "data+tensor", 4),
        ("mesh['axis_0'=2,'axis_1'=2,'axis_2'=2] {'axis_0'}", "data", 2),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", "data+fsdp", 4),
        ("mesh['a'=8] {'a':(1)2}", "data", 2),
        ("mesh['a'=8] {'a':(2)2}", "fsdp", 2),
        ("mesh['data'=2,'fsdp'=2,'tensor'=2] {'fsdp','tensor'}", "fsdp+tensor", 4),
    ],
)
def test_every_form_of_groups_maps_to_axes_by_membership(groups, axis, size):
    line = f"  %r = f32[8,128]{{1,0}} all-reduce(%x), replica_groups={groups}, to_apply=%add"
    found = only(program(line), mesh_shape(data=2, fsdp=2, tensor=2))
    assert (found.axis, found.group_size) == (axis, size)


def test_a_group_that_is_part_of_an_axis_is_called_so():
    line = "  %r = f32[8,128]{1,0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add"
    assert only(program(line), mesh_shape(fsdp=4)).axis == "part of fsdp"


# --- bytes, counts, kinds -------------------------------------------------------------

SIZE = 8 * 128 * 4


@pytest.mark.parametrize(
    ("text", "kind", "payload", "wire"),
    [
        (
            "f32[32,128]{1,0} all-gather(%x), dimensions={0}",
            "all-gather",
            4 * SIZE,
            3 * SIZE,
        ),
        (
            "f32[8,128]{1,0} all-reduce(%x), to_apply=%add",
            "all-reduce",
            SIZE,
            1.5 * SIZE,
        ),
        (
            "f32[2,128]{1,0} reduce-scatter(%x), to_apply=%add",
            "reduce-scatter",
            SIZE,
            0.75 * SIZE,
        ),
        (
            "f32[8,128]{1,0} all-to-all(%x), dimensions={0}",
            "all-to-all",
            SIZE,
            0.75 * SIZE,
        ),
    ],
)
def test_bytes_and_wire_bytes_of_each_kind(text, kind, payload, wire):
    found = only(
        program(f"  %r = {text}, replica_groups=[2,4]<=[8]"), mesh_shape(data=2, fsdp=4)
    )
    assert (found.kind, found.bytes, found.wire_bytes, found.count) == (
        kind,
        payload,
        wire,
        3,
    )
    assert found.in_loop
    assert not found.asynchronous
    assert found.link is None
    assert found.step_s == 0


def test_permutes_send_their_bytes_once_along_the_axis_of_their_pairs():
    line = (
        "  %s = (f32[8,128], f32[8,128], u32[], u32[]) collective-permute-start(%x), channel_id=1, "
        "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}\n"
        "  %y = f32[8,128]{1,0} add(%x, %x)\n"
        "  %d = f32[8,128]{1,0} collective-permute-done(%s)"
    )
    found = only(program(line), mesh_shape(fsdp=4))
    assert (found.kind, found.axis, found.wire_bytes) == (
        "collective-permute",
        "fsdp",
        SIZE,
    )
    assert found.asynchronous
    assert found.ends - found.begins == 2


def test_a_computation_of_another_thread_ends_where_it_ends():
    text = """HloModule m

%a () -> f32[] {
  ROOT %x = f32[] constant(1)
}, execution_thread="sparsecore"

%b () -> f32[] {
  ROOT %y = f32[] constant(1)
}

ENTRY %main () -> f32[] {
  ROOT %z = f32[] fusion(), kind=kLoop, calls=%b
}
"""
    module = hlo.parse(text)
    assert sorted(module.computations) == ["a", "b", "main"]
    assert module.entry == "main"


def test_a_call_on_the_sparse_core_is_asynchronous():
    body = """  %s = (f32[8,128]) call-start(%x), async_execution_thread="sparsecore", calls=%offload
  %u = (f32[8,128]) call-update(%s)
  %d = f32[8,128]{1,0} call-done(%u)"""
    module = program(body)
    inner = """%offload (y: f32[8,128]) -> f32[8,128] {
  %y = f32[8,128]{1,0} parameter(0)
  ROOT %r = f32[8,128]{1,0} all-reduce(%y), replica_groups={{0,1,2,3}}, to_apply=%add
}
"""
    module = dataclasses.replace(
        module,
        computations=module.computations
        | hlo.parse(inner + "ENTRY %e () -> f32[] {\n}").computations,
    )
    found = only(module, mesh_shape(fsdp=4))
    assert (found.kind, found.name, found.count, found.asynchronous) == (
        "all-reduce",
        "s",
        3,
        True,
    )


def test_a_gather_by_all_reduce_is_still_a_gather():
    line = (
        "  %zeros = f32[32,128]{1,0} broadcast(%x), dimensions={}\n"
        "  %o = s32[] constant(0)\n"
        "  %own = f32[32,128]{1,0} dynamic-update-slice(%zeros, %x, %o, %o)\n"
        "  %g = f32[32,128]{1,0} all-reduce(%own), replica_groups={}, to_apply=%add"
    )
    found = only(program(line), mesh_shape(fsdp=4))
    assert (found.kind, found.what, found.gathers_weights) == (
        "all-reduce",
        "gather of blocks/mlp/up",
        True,
    )


def test_names_follow_weights_through_slices_and_casts():
    line = (
        "  %h = bf16[8,128]{1,0} convert(%x)\n"
        "  %g = bf16[32,128]{1,0} all-gather(%h), replica_groups=[1,4]<=[4], dimensions={0}"
    )
    found = only(program(line), mesh_shape(fsdp=4))
    assert found.what == "gather of blocks/mlp/up"
    assert found.gathers_weights
    assert found.dtype == "bf16"


# --- real programs --------------------------------------------------------------------


def test_fusions_of_one_asynchronous_gather_count_once():
    found = read("v5e_fsdp256")
    gather = found["async-collective-start"]
    assert (gather.kind, gather.axis, gather.dtype, gather.count) == (
        "all-gather",
        "fsdp",
        "bf16",
        32,
    )
    assert gather.asynchronous
    assert gather.bytes == 4096 * 64 * 128 * 2
    assert gather.what == "gather of blocks/attention/query"
    assert gather.module.startswith("Attention.heads (transformer.py:")
    assert gather.phase == "forward"
    assert "dot_general" in gather.hidden_by
    assert not found["all-gather.217"].asynchronous
    gradient = found["all-reduce.64"]
    assert (gradient.kind, gradient.dtype, gradient.phase) == (
        "all-reduce",
        "f32",
        "backward",
    )
    assert "blocks/attention/query" in gradient.what
    assert gradient.what.startswith("gradient of ")
    assert gradient.wire_s == pytest.approx(2 * 255 / 256 * 4096 * 64 * 128 * 4 / 180e9)


def test_fused_all_reduce_and_slice_is_a_reduce_scatter():
    found = read("v5p_tensor4")
    gradient = found["fusion.408"]
    assert (gradient.kind, gradient.axis, gradient.group_size) == (
        "reduce-scatter",
        "fsdp",
        16,
    )
    assert gradient.what == "gradient of blocks/attention/query"
    assert gradient.count == 4
    activations = found["all-reduce.104"]
    assert (activations.axis, activations.what) == ("tensor", "activations")
    assert found["all-reduce.83"].axis == "fsdp+tensor"
    assert found["all-to-all"].axis == "fsdp"
    assert not found["all-to-all"].in_loop
    permute = found["collective-permute-start"]
    assert permute.asynchronous
    assert permute.axis == "fsdp"
    assert permute.what.startswith("gradient")


@pytest.mark.parametrize("libtpu", [42, 50])
def test_collectives_on_the_sparse_core_have_names_and_windows(libtpu):
    name = f"v5p_sparse_core_{libtpu}"
    found = {one.kind: one for one in read(name).values()}
    gather, gradient, head = (
        found["all-gather"],
        found["reduce-scatter"],
        found["all-reduce"],
    )
    assert all(
        one.asynchronous and one.axis == "fsdp" and one.group_size == 64
        for one in found.values()
    )
    assert (gather.what, gather.dtype, gather.count) == (
        "gather of blocks/mlp/up",
        "bf16",
        4,
    )
    assert gather.bytes == 4096 * 14336 * 2
    assert gather.module.startswith("FeedForward.__call__ (layers.py:")
    assert (gradient.what, gradient.phase, gradient.count) == (
        "gradient",
        "backward",
        4,
    )
    assert gradient.bytes == 4 * 4096 * 14336
    assert gradient.module.startswith("FeedForward.__call__ (layers.py:")
    assert (head.what, head.count, head.bytes) == ("gradient", 1, 4096 * 128256 * 4)
    # 0.0.50.1 starts them long before there is anything to send: the window opens with
    # the operands.
    steps = list(
        hlo.parse((HLO / f"{name}.txt").read_text())
        .computations[gather.computation]
        .values()
    )
    assert any(
        "slice_convert_fusion" in operand for operand in steps[gather.begins].operands
    )
    assert "dot_general" in gather.hidden_by
    assert steps[gather.ends].opcode == "call-done"


def test_host_transfers_between_slices_are_collectives_over_the_slices():
    found = read("v5e_two_slices")
    gradient = found["send.28"]
    assert (gradient.kind, gradient.axis, gradient.group_size) == (
        "all-reduce",
        "data",
        2,
    )
    assert gradient.link.name == "DCN"
    assert gradient.asynchronous
    assert gradient.ends > gradient.begins + 5
    # Four layers, the first of them peeled off the loop.
    assert gradient.count == 3
    inside = found["all-reduce.163"]
    assert (inside.axis, inside.group_size, inside.link.name) == ("fsdp", 16, "ICI")


def test_gpu_collectives_start_and_end():
    found = read("h100_4x8")
    assert {one.asynchronous for one in found.values()} == {True}
    tensor = next(one for one in found.values() if one.axis == "tensor")
    assert (tensor.kind, tensor.link.name) == ("all-reduce", "NVLink")
    scattered = [one for one in found.values() if one.kind == "reduce-scatter"]
    assert scattered
    assert {one.link.name for one in scattered} == {"InfiniBand"}
    assert {one.dtype for one in scattered} == {"f32"}


def test_a_loop_of_known_length_counts_from_where_it_starts():
    module = hlo.parse((HLO / "v5e_two_slices.txt").read_text())
    (loop,) = (
        step
        for step in module.computations[module.entry].values()
        if step.opcode == "while"
    )
    (condition,) = loop.called("condition")
    assert any(
        "constant(4)" in step.text for step in module.computations[condition].values()
    )
    # from 1 to 4: the first iteration stands before it
    assert module.trip_count(loop) == 3
    assert {run.times for run in module.runs()} == {1, 3}


def test_stack_of_an_instruction():
    module = hlo.parse((HLO / "v5p_tensor4.txt").read_text())
    run = next(
        run
        for run in module.runs()
        if "all-gather.73" in module.computations[run.computation]
    )
    frames = module.stack(module.computations[run.computation]["all-gather.73"])
    names = [frame.function for frame in frames]
    assert (
        names.index("project")
        < names.index("Attention.heads")
        < names.index("Block.__call__")
    )


# --- warnings -------------------------------------------------------------------------


def warned(found, **options):
    return communication.warnings(list(found), **{"compute": "bfloat16", **options})


def test_synchronous_collectives_of_the_layer_loop_are_named_with_their_module():
    lines = warned(read("v5e_fsdp256").values())
    assert any(
        "32 all-reduces over fsdp in a loop are synchronous" in line for line in lines
    )
    assert all(
        "Attention.heads (transformer.py:" in line
        for line in lines
        if "synchronous" in line
    )
    assert not any("async-collective" in line for line in lines)


def test_what_is_exposed_is_said_with_its_time_its_reason_and_its_cure():
    v5e, v5p = targets.parse("v5e:16x16").chip, targets.parse("v5p:4x4x4").chip
    found = read("v5e_fsdp256")
    gradient, gather = found["all-reduce.64"], found["async-collective-start"]
    (line,) = warned([gradient], chip=v5e, step_s=10 * gradient.step_s)
    assert "(10%)" in line.replace(".0", "").replace(" %", "%")
    assert "whole gradients" in line
    assert "on a TPU v5e, only some gathers overlap" in line
    assert "precision.reduce=bfloat16 halves" in line
    part = dataclasses.replace(gradient, axis="part of fsdp", what="activations")
    (line,) = warned(
        [part], chip=targets.parse("h100").chip, step_s=10 * gradient.step_s
    )
    assert "a smaller mesh.fsdp sends less" in line
    assert "libtpu" not in line
    (line,) = warned(
        [gradient], chip=targets.parse("h100").chip, step_s=10 * gradient.step_s
    )
    assert "libtpu" not in line
    (line,) = warned(
        [dataclasses.replace(gradient, dtype="bf16")],
        chip=v5p,
        step_s=10 * gradient.step_s,
    )
    assert "SparseCore did not take" in line
    assert "precision.reduce" not in line
    half = dataclasses.replace(gather, hidden_s=gather.step_s / 2)
    (line,) = warned([half], chip=v5e, step_s=10 * gather.step_s)
    assert "compute that is too short" in line
    assert "gather of blocks/attention/query" in line
    assert not warned(
        [dataclasses.replace(gather, hidden_s=gather.step_s)],
        chip=v5e,
        step_s=gather.step_s,
    )
    assert not warned([half], chip=v5e, step_s=1000 * gather.step_s)


def test_float32_gathers_and_reduced_gathers():
    gather = read("v5e_fsdp256")["all-gather.217"]
    assert not any("float32" in line for line in warned([gather]))
    wide = dataclasses.replace(gather, dtype="f32")
    assert any("they are used in bfloat16: cast" in line for line in warned([wide]))
    assert any(
        "precision.compute=bfloat16" in line
        for line in warned([wide], compute="float32")
    )
    reduced = dataclasses.replace(gather, kind="all-reduce")
    assert any("gathered by all-reduce" in line for line in warned([reduced]))


def test_tensor_over_slow_links():
    tensor = next(one for one in read("h100_4x8").values() if one.axis == "tensor")
    assert not any("keep it inside" in line for line in warned([tensor]))
    slow = dataclasses.replace(tensor, link=targets.Link("InfiniBand", 5e10))
    assert any(
        "mesh axis tensor" in line and "InfiniBand" in line for line in warned([slow])
    )


def test_rematerialisation_in_the_log_and_second_forwards():
    log = (
        "W0000 spmd_partitioner.cc:652] [SPMD] Involuntary full rematerialization. The compiler cannot go "
        "from {devices=[4,1]<=[4]} to {devices=[1,4]<=[4]} efficiently for HLO operation %dot = f32[8,8] "
        'dot(%a, %b), metadata={op_name="jit(step)/jvp()/dot_general"}\nanother line'
    )
    (line,) = warned([], log=log)
    assert "1 x at jit(step)/jvp()/dot_general" in line
    (line,) = warned([], forwards_per_backward=2.0)
    assert "runs 2 times per layer" in line
    assert "attention_residuals" in line
    assert warned([]) == []


# --- codes of 8-bit floats ------------------------------------------------------------

CODES = """HloModule test

%fused_convert.18 (codes_of: f32[2,2048,4096], scale: f32[4096]) -> f8e4m3fn[1,2048,4096] {
  %codes_of = f32[2,2048,4096]{2,1,0} parameter(0)
  %layer = s32[] constant(0)
  %slice = f32[1,2048,4096]{2,1,0} dynamic-slice(%codes_of, %layer, %layer, %layer), \
dynamic_slice_sizes={1,2048,4096}
  %scale = f32[4096]{0} parameter(1)
  %spread = f32[1,2048,4096]{2,1,0} broadcast(%scale), dimensions={2}
  %mul = f32[1,2048,4096]{2,1,0} multiply(%slice, %spread)
  ROOT %codes = f8e4m3fn[1,2048,4096]{2,1,0} convert(%mul)
}

ENTRY %main (p: f32[2,2048,4096], amax: f32[4096], e: s32[2048]) -> u8[4096,4096] {
  %p = f32[2,2048,4096]{2,1,0} parameter(0), metadata={op_name="state.trainable['blocks']['mlp']['up']"}
  %amax = f32[4096]{0} parameter(1)
  %made = s32[2048]{0} constant({...})
  %scale = f32[4096]{0} add(%amax, %amax)
  %fusion = f8e4m3fn[1,2048,4096]{2,1,0} fusion(%p, %scale), kind=kLoop, calls=%fused_convert.18
  %bytes = u8[2048,4096]{1,0} bitcast(%fusion)
  %start = ((s32[2048]{0}, u8[2048,4096]{1,0}), (s32[4096]{0}, u8[4096,4096]{1,0})) \
all-gather-start(%made, %bytes), replica_groups={{0,1}}, dimensions={0}
  %done = (s32[4096]{0}, u8[4096,4096]{1,0}) all-gather-done(%start)
  ROOT %out = u8[4096,4096]{1,0} get-tuple-element(%done), index=1
}
""".replace("\\\n", "")


def test_codes_of_weights_are_gathered_in_bytes_and_named():
    shape = mesh_shape(fsdp=2)
    found = only(hlo.parse(CODES), shape)
    assert (found.what, found.dtype, found.gathers_weights) == (
        "gather of blocks/mlp/up",
        "u8",
        True,
    )
    assert found.bytes == 2 * (2048 * 4096 + 4 * 2048)  # and a few integers with them
    unknown = only(hlo.parse(CODES.replace("multiply(%slice", "maximum(%slice")), shape)
    assert unknown.what == "tokens"  # what is first there are integers
    alone = CODES.replace("multiply(%slice", "maximum(%slice").replace(
        "(%made, %bytes)", "(%bytes)"
    )
    assert only(hlo.parse(alone), shape).what == "gather of weights"
