"""Schedules: closed forms, the checker against an oracle, compiled programs run on
tokens.
"""

import itertools
import json
import xml.etree.ElementTree as ElementTree
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.config import ConfigError
from jaxdist.parallel.pipeline.schedules.balance import (
    balance,
    bubble_fraction,
    microbatch_options,
)
from jaxdist.parallel.pipeline.schedules.program import (
    KINDS,
    ScheduleRows,
    compile_schedule,
)
from jaxdist.parallel.pipeline.schedules.simulator import Costs, draw_svg, simulate
from jaxdist.parallel.pipeline.schedules.table import (
    SCHEDULES,
    Schedule,
    build_schedule,
    check,
    write_schedule,
)

SIZES = range(1, 9)
PLAIN = [(name, p, m, 1) for name in ("gpipe", "1f1b") for p in SIZES for m in SIZES]
CHUNKED = [
    ("interleaved", p, m, v)
    for p, m, v in itertools.product(SIZES, SIZES, SIZES)
    if m % p == 0
]
LONGER = [
    ("interleaved", p, m, v) for p in (2, 3, 4) for m in (4 * p, 5 * p) for v in (2, 3)
]
ALL = [*PLAIN, *CHUNKED, *LONGER, ("1f1b", 4, 33, 1), ("gpipe", 3, 20, 1)]


def ticks_of(name, p, m, v):
    """The closed forms of docs/explanation/pipeline-executor.md."""
    return 2 * (m + p - 1) if name == "gpipe" else m * v + v * p + p - 2


class Machine:
    """Runs a compiled program on tokens: ("x", i, k) is the input of place k, ("g", i,
    k) the gradient of its output. Everything else is junk, and junk may only ever meet
    trash."""

    def __init__(self, program):
        self.program, self.p = program, program.schedule.stages
        self.places = self.p * program.schedule.chunks
        self.inputs = [["junk"] * (program.num_inputs + 1) for _ in range(self.p)]
        self.gradients = [["junk"] * (program.num_gradients + 1) for _ in range(self.p)]
        self.y, self.dx = ["junk"] * self.p, ["junk"] * self.p
        self.done = []

    def run(self):
        end = 0
        for run in self.program.runs:
            assert run.start == end
            assert run.length > 0
            assert run.every <= run.some
            end += run.length
            for tick in range(run.start, end):
                self.tick(tick, run)
        assert end == len(self.program.schedule.table)
        return self

    def does(self, tick, run, kind):
        flag = bool(getattr(self.program.ticks, f"any_{kind}")[tick])
        assert flag or kind not in run.every
        assert kind in run.some or not flag
        return flag

    def tick(self, tick, run):
        row = type(self.program.rows)(*(column[tick] for column in self.program.rows))
        e_mb, h_mb, eb_mb = (column[tick] for column in self.program.ticks[:3])
        stages = range(self.p)
        arrived = [self.dx[(s + 1) % self.p] for s in stages]
        if self.does(tick, run, "embed"):
            for s in stages:
                self.inputs[s][row.e_x[s]] = ("x", e_mb, 0)
        if self.does(tick, run, "forward"):
            self.y = [self.forward(s, row) for s in stages]
        if "gradient_hop" in run.some:
            self.does(tick, run, "gradient_hop")
            for s in stages:
                self.keep(self.gradients[s], row.rg[s], arrived[s])
        if self.does(tick, run, "head"):
            assert self.y[-1] == ("x", h_mb, self.places)
            self.done.append(("head", h_mb))
            for s in stages:
                self.gradients[s][row.h_g[s]] = ("g", h_mb, self.places - 1)
        hopped = [self.y[s - 1] for s in stages]
        if self.does(tick, run, "backward"):
            self.dx = [self.backward(s, row) for s in stages]
        if self.does(tick, run, "embed_backward"):
            assert self.dx[0] == ("g", eb_mb, -1)
            self.done.append(("embed_backward", eb_mb))
        if "hop" in run.some:
            self.does(tick, run, "hop")
            for s in stages:
                self.keep(self.inputs[s], row.rx[s], hopped[s])

    def keep(self, buffer, slot, value):
        assert value != "junk" or slot == len(buffer) - 1, "junk is kept"
        buffer[slot] = value if slot < len(buffer) - 1 else "junk"

    def forward(self, s, row):
        if row.f_mb[s] < 0:
            assert row.f_x[s] == self.program.num_inputs
            assert row.f_chunk[s] == 0
            return "junk"
        place = row.f_chunk[s] * self.p + s
        assert self.inputs[s][row.f_x[s]] == ("x", row.f_mb[s], place)
        self.done.append(("forward", row.f_mb[s], place))
        return ("x", row.f_mb[s], place + 1)

    def backward(self, s, row):
        if row.b_mb[s] < 0:
            assert row.b_x[s] == self.program.num_inputs
            assert row.b_g[s] == self.program.num_gradients
            return "junk"
        place = row.b_chunk[s] * self.p + s
        assert self.inputs[s][row.b_x[s]] == ("x", row.b_mb[s], place)
        assert self.gradients[s][row.b_g[s]] == ("g", row.b_mb[s], place)
        self.done.append(("backward", row.b_mb[s], place))
        return ("g", row.b_mb[s], place - 1)


def assert_executes(schedule, **options):
    program = compile_schedule(schedule, **options)
    assert_executes_program(program)
    return program


def assert_executes_program(program):
    schedule = program.schedule
    done = Machine(program).run().done
    microbatches, places = (
        range(schedule.microbatches),
        schedule.stages * schedule.chunks,
    )
    wanted = [(word, i) for word in ("head", "embed_backward") for i in microbatches]
    wanted += [
        (word, i, k)
        for word in ("forward", "backward")
        for i in microbatches
        for k in range(places)
    ]
    assert sorted(done) == sorted(wanted)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_every_table_is_valid_and_its_program_reads_the_right_values(name):
    cases = [case for case in ALL if case[0] == name]
    assert len(cases) >= 64
    for case in cases:
        table = build_schedule(*case)
        assert len(table.table) == ticks_of(*case), case
        for max_runs in (1, 8, 10_000):
            assert_executes(table, max_runs=max_runs)


@pytest.mark.parametrize("column", ScheduleRows._fields)
def test_one_wrong_entry_of_any_row_is_seen(column):
    """The machine above is a proof only if it notices."""
    program = assert_executes(build_schedule("interleaved", 2, 4, 2))
    trash = {"mb": -1, "x": program.num_inputs, "g": program.num_gradients}
    empty = next((value for end, value in trash.items() if column.endswith(end)), 0)
    row = getattr(program.rows, column)
    used = np.argwhere(row != empty)
    assert len(used) >= 4
    for tick, stage in used.tolist():
        kept, row[tick, stage] = row[tick, stage], empty
        with pytest.raises(AssertionError):
            assert_executes_program(program)
        row[tick, stage] = kept
    assert_executes_program(program)


@pytest.mark.parametrize(("name", "p", "m", "v"), ALL)
def test_slots_are_the_closed_forms(name, p, m, v):
    program = compile_schedule(build_schedule(name, p, m, v))
    stages = range(p)
    if name == "gpipe":
        assert program.live_inputs == (m,) * p
        assert program.num_gradients == m
        return
    assert program.num_gradients == 1
    if v == 1:
        assert program.live_inputs == tuple(min(m, 2 * (p - s) - 1) for s in stages)
        assert program.num_inputs == min(m, 2 * p - 1)
    elif m >= 2 * p:
        assert program.live_inputs == tuple((v + 1) * p - 1 - 2 * s for s in stages)
        assert program.num_inputs == (v + 1) * p - 1


def test_memory_is_flat_in_the_number_of_microbatches():
    for name, v in (("1f1b", 1), ("interleaved", 4)):
        slots = {
            compile_schedule(build_schedule(name, 4, m, v)).num_inputs
            for m in (8, 16, 32, 64)
        }
        assert len(slots) == 1, name


def test_runs_of_1f1b_need_no_predicate_and_many_runs_fall_back():
    program = compile_schedule(build_schedule("1f1b", 4, 16))
    assert [run.length for run in program.runs] == [3, 3, 10, 3, 3]
    compute = set(KINDS[:5])
    assert all(run.some & compute == run.every & compute for run in program.runs)
    assert program.runs[2].every >= compute
    assert program.runs[0].every & compute == {"embed", "forward"}
    program = compile_schedule(build_schedule("interleaved", 4, 16, 2))
    assert [run.some >= {"forward", "backward"} for run in program.runs] == [
        False,
        True,
        False,
    ]
    steady = program.runs[1]
    assert steady.every >= {"forward", "backward"}
    assert "head" in steady.some - steady.every


# Efficiencies: ideal 3m over time, forward 1 and backward 2 a stage.
EFFICIENCY = """
4,8 .727 .842 .914
4,16 .842 .914 .955
4,32 .914 .955 .977
4,64 .955 .977 .988
8,8 .533 .696 .821
8,16 .696 .821 .901
8,32 .821 .901 .948
8,64 .901 .948 .973
16,16 .516 .681 .810
16,32 .681 .810 .895
"""


@pytest.mark.parametrize("line", EFFICIENCY.strip().splitlines())
def test_simulated_efficiency(line):
    sizes, *numbers = line.split()
    p, m = map(int, sizes.split(","))
    for v, number in zip((1, 2, 4), numbers, strict=True):
        names = ("gpipe", "1f1b") if v == 1 else ("interleaved",)
        for name in names:
            result = simulate(build_schedule(name, p, m, v))
            assert result.time == pytest.approx(3 * m + 3 * (p - 1) / v)
            assert f"{1 - result.bubble:.3f}".lstrip("0") == number, (name, v)
            assert result.bubble == pytest.approx(bubble_fraction(p, m, v))


@pytest.mark.parametrize(
    ("p", "m", "head", "last", "sharded"),
    [
        (4, 16, 0.25, 0.739, 0.850),
        (4, 16, 0.5, 0.667, 0.857),
        (4, 16, 1, 0.571, 0.870),
        (8, 32, 0.25, 0.702, 0.825),
        (8, 32, 1, 0.507, 0.837),
    ],
)
def test_a_sharded_head_is_balanced(p, m, head, last, sharded):
    table = build_schedule("1f1b", p, m)
    for edges, number in (("last", last), ("sharded", sharded)):
        result = simulate(table, Costs(head=3 * head, edges=edges))
        assert 1 - result.bubble == pytest.approx(number, abs=6e-4), edges


def test_the_slowest_chunk_sets_the_pace():
    table = build_schedule("interleaved", 2, 4, 2)
    even = simulate(table)
    forward = np.full((2, 2), 0.5)
    forward[1, 1] = 0.75
    slower = simulate(table, Costs(forward=forward, hop=0.125))
    chunk_one = (compile_schedule(table).rows.f_chunk[:, 1] == 1).sum()
    hops = slower.phases[:, -1].sum()
    assert hops > 0
    assert chunk_one == 4
    assert slower.time == pytest.approx(even.time + 0.25 * chunk_one + hops)
    with pytest.raises(ValueError, match="shape"):
        simulate(table, Costs(backward=[1.0, 1.0, 1.0]))


# The checker
# --------------------------------------------------------------------------------------


def is_valid(schedule):
    """Plays the table tick by tick, and checks that every op finds its input.

    An oracle: the checker works by another method.
    """
    stages, chunks = schedule.stages, schedule.chunks
    last_part = stages * chunks - 1
    have_input = {(microbatch, 0) for microbatch in range(schedule.microbatches)}
    have_gradient, done = set(), set()
    for tick in schedule.table:
        arriving_inputs, arriving_gradients = set(), set()
        for slot in (0, 1):
            for stage, entry in enumerate(tick[:, slot].tolist()):
                if entry == -1:
                    continue
                microbatch, chunk = divmod(entry, chunks)
                part = chunk * stages + stage
                forward = (0, microbatch, part)
                here = (microbatch, part)
                if (slot, *here) in done or here not in have_input:
                    return False
                if slot == 1 and (here not in have_gradient or forward not in done):
                    return False
                done.add((slot, *here))
                if slot == 1:
                    arriving_gradients.add((microbatch, part - 1))
                elif part == last_part:
                    have_gradient.add(here)
                else:
                    arriving_inputs.add((microbatch, part + 1))
        have_input |= arriving_inputs
        have_gradient |= arriving_gradients
    return len(done) == 2 * schedule.microbatches * stages * chunks


@st.composite
def damaged(draw):
    name, p, m, v = draw(st.sampled_from([case for case in ALL if max(case[1:]) <= 4]))
    table = build_schedule(name, p, m, v).table.copy()
    cell = st.tuples(*(st.integers(0, size - 1) for size in table.shape))
    for _ in range(draw(st.integers(0, 2))):
        match draw(st.sampled_from(["swap", "drop", "write", "delay"])):
            case "swap":
                a, b = draw(cell), draw(cell)
                table[a], table[b] = table[b], table[a]
            case "drop":
                table[draw(cell)] = -1
            case "write":
                table[draw(cell)] = draw(st.integers(0, m * v - 1))
            case "delay":
                table = np.insert(table, draw(cell)[0], -1, axis=0)
    return Schedule(p, m, v, table)


@settings(max_examples=300)
@given(damaged())
def test_the_checker_agrees_with_an_oracle_and_what_it_passes_executes(schedule):
    faults = check(schedule)
    assert (not faults) == is_valid(schedule), faults
    if faults:
        with pytest.raises(ConfigError) as error:
            compile_schedule(schedule)
        assert list(error.value.faults) == faults
    else:
        assert_executes(schedule)


class Op(NamedTuple):
    """The forward or backward pass of a microbatch through a part of the layers."""

    slot: int  # in a tick: 0 for forward passes, 1 for backward passes
    microbatch: int
    part: int  # stage p has the parts p, p + stages, p + 2 * stages, ...

    def is_ready(self, tick: int, done: dict["Op", int], num_parts: int) -> bool:
        """Checks that what the op needs is done: in an earlier tick if it comes from
        another part, in the same tick at the latest if it is its own forward pass.
        """
        if self.slot == 0:
            before = self._replace(part=self.part - 1)
            return self.part == 0 or done.get(before, tick) < tick
        forward, after = self._replace(slot=0), self._replace(part=self.part + 1)
        is_last = self.part == num_parts - 1
        return done.get(forward, tick + 1) <= tick and (
            is_last or done.get(after, tick) < tick
        )


def random_schedule(stages, microbatches, chunks, random):
    """Returns a table in which an op that is ready is done, or put off, at random."""
    num_parts = stages * chunks
    ops = [
        Op(slot, microbatch, part)
        for slot in (0, 1)
        for microbatch in range(microbatches)
        for part in range(num_parts)
    ]
    done, table = {}, []
    while len(done) < len(ops):
        tick, row = len(table), np.full((stages, 2), -1)
        random.shuffle(ops)
        for op in sorted(ops, key=lambda op: op.slot):
            place = (op.part % stages, op.slot)
            is_free = op not in done and row[place] == -1
            is_ready = op.is_ready(tick, done, num_parts)
            if is_free and is_ready and random.random() < 0.6:
                done[op] = tick
                row[place] = op.microbatch * chunks + op.part // stages
        table.append(row)
    return Schedule(stages, microbatches, chunks, np.array(table))


@settings(max_examples=100)
@given(
    stages=st.integers(1, 4),
    microbatches=st.integers(1, 4),
    chunks=st.integers(1, 3),
    random=st.randoms(use_true_random=False),
)
def test_any_valid_table_executes(stages, microbatches, chunks, random):
    """Tables need not be those of a known schedule."""
    schedule = random_schedule(stages, microbatches, chunks, random)
    assert is_valid(schedule)
    assert_executes(schedule)


def test_the_checker_reports_all_that_is_wrong_and_where():
    table = build_schedule("1f1b", 2, 3).table.copy()
    assert check(Schedule(2, 3, 1, table)) == []
    table[0, 0, 0] = -1  # the first forward is missing
    table[3, 0, 0] = 1  # a forward twice
    table[4, 1, 1] = 9  # no such microbatch
    faults = "\n".join(check(Schedule(2, 3, 1, table)))
    assert "forward of microbatch 0, chunk 0 on stage 0 is missing" in faults
    assert "forward of microbatch 1, chunk 0 on stage 0 stands in ticks 1, 3" in faults
    assert "tick 4, stage 1: backward entry 9 is outside -1..2" in faults
    early = build_schedule("1f1b", 2, 1).table.copy()
    early[0, 1], early[1, 1] = early[1, 1].copy(), early[0, 1].copy()
    (fault,) = check(Schedule(2, 1, 1, early))
    assert fault == (
        "tick 0: forward of microbatch 0, chunk 0 on stage 1 needs forward of microbatch 0, "
        "chunk 0 on stage 0 in tick -1 or before; it is in tick 0"
    )
    assert "is required" in check(Schedule(2, 1, 1, early[:, :1]))[0]
    assert "integers" in check(Schedule(2, 1, 1, early * 1.0))[0]


def test_a_table_that_would_deadlock_is_refused():
    """Stage 0 wants the gradient of microbatch 1 first, stage 1 does not get to it
    before 0's.
    """
    table = np.full((5, 2, 2), -1)
    table[0, 0, 0], table[1, 0, 1], table[2, 0, 0], table[3, 0, 1] = 0, 0, 1, 1
    table[1, 1, 0], table[2, 1, 0], table[2, 1, 1], table[3, 1, 1] = 1, 0, 0, 1
    faults = check(Schedule(2, 2, 1, table))
    assert any(
        fault.startswith(
            "tick 1: backward of microbatch 0, chunk 0 on stage 0 needs backward of"
        )
        for fault in faults
    )


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("1f1b", 4, 8, 2), "pipeline.schedule=interleaved"),
        (("gpipe", 4, 8, 2), "chunks=1"),
        (("interleaved", 4, 6, 2), "set it to 4 or 8"),
        (("interleaved", 4, 3, 2), "set it to 4,"),
        (("1fb1", 4, 8, 1), "gpipe, 1f1b, interleaved"),
        (("1f1b", 0, 8, 1), "mesh.pipeline is 0"),
    ],
)
def test_numbers_that_no_schedule_takes(case, words):
    with pytest.raises(ConfigError) as error:
        build_schedule(*case)
    assert words in str(error.value)


# Files
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [("1f1b", 3, 5, 1), ("gpipe", 2, 3, 1), ("interleaved", 2, 4, 3)]
)
def test_a_file_holds_the_same_table(case, tmp_path):
    schedule = build_schedule(*case)
    path = tmp_path / "table.json"
    write_schedule(schedule, path)
    again = build_schedule(str(path), *case[1:])
    assert np.array_equal(again.table, schedule.table)
    assert again.table.dtype == np.int32
    assert (again.stages, again.microbatches, again.chunks) == case[1:]
    assert again.name == case[0]
    with pytest.raises(FileExistsError):
        write_schedule(schedule, path)
    with pytest.raises(
        ConfigError, match=f"is for {case[1]} stages, the configuration has 9"
    ):
        build_schedule(str(path), 9, *case[2:])


def test_an_invalid_file_is_refused_in_the_checkers_words(tmp_path):
    path = tmp_path / "table.json"
    write_schedule(build_schedule("1f1b", 2, 2), path)
    data = json.loads(path.read_text())
    data["ticks"][0][0] = ""
    path.write_text(json.dumps(data))
    with pytest.raises(
        ConfigError, match="table.json: forward of microbatch 0.*is missing"
    ):
        build_schedule(str(path), 2, 2, 1)
    data["ticks"][0] = ["B0 F0", "F7", "F0"]
    data["ticks"][1][1] = 3
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError) as error:
        build_schedule(str(path), 2, 2)
    assert len(error.value.faults) == 4
    assert "tick 0 has 3 cells; 2 are required" in error.value.faults[0]
    assert "tick 0, stage 1: 'F7' is no cell" in error.value.faults[2]
    assert "tick 1, stage 1: 3 is no cell" in error.value.faults[3]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "it is list; required: dict"),
        ("[" * 100_000, "nested deeper than"),
        ('{"format": "?"}', '"version": 1'),
        (
            '{"stages": 0, "microbatches": true, "chunks": 1, "ticks": {}}',
            "is for 0 stages",
        ),
        (
            '{"stages": 1, "microbatches": 1000000000, "chunks": 9, "ticks": [[""]]}',
            "for 1000000000 micro",
        ),
        ('{"stages": 1, "microbatches": 1, "chunks": 1, "ticks": []}', "cannot hold"),
    ],
)
def test_a_file_that_is_none(text, words, tmp_path):
    path = tmp_path / "table.json"
    path.write_text(
        text.replace('{"st', '{"format": "jaxdist.schedule", "version": 1, "st')
    )
    with pytest.raises(ConfigError) as error:
        build_schedule(str(path), 1, 1)
    assert words in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        build_schedule(str(tmp_path / "absent.json"), 1, 1)


# A picture, advice, balance
# -----------------------------------------------------------------------


def test_the_timeline_as_svg():
    schedule = build_schedule("interleaved", 2, 4, 2)
    schedule = Schedule(2, 4, 2, schedule.table, "<script>")
    text = draw_svg(schedule)
    root = ElementTree.fromstring(text)
    kinds = [box.get("class") for box in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert kinds.count("f") == kinds.count("b") == 2 * 4 * 2
    boxes = [
        box
        for box in root.iter("{http://www.w3.org/2000/svg}rect")
        if box.get("class") != "i"
    ]
    assert max(float(box.get("x")) + float(box.get("width")) for box in boxes) <= 960
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "<script>" not in text
    with pytest.raises(ConfigError):
        draw_svg(Schedule(2, 4, 2, schedule.table[:-1]))


def test_advice_follows_the_bubble_formula():
    assert bubble_fraction(4, 16) == 3 / 19
    assert bubble_fraction(8, 32, 4) == 7 / 135
    more, chunks = microbatch_options(4, 16, choices=[8, 16, 32, 64], layers=32)
    assert (more.overrides, more.bubble) == ("pipeline.microbatches=32", 3 / 35)
    assert chunks.overrides == "pipeline.schedule=interleaved pipeline.chunks=2"
    assert chunks.bubble == 3 / 35
    assert microbatch_options(4, 64, choices=[128], layers=32) == []
    (best,) = microbatch_options(4, 4, choices=[4, 8], layers=7)  # no target, no chunks
    assert best == ("pipeline.microbatches=8", 3 / 11)
    assert microbatch_options(4, 6, choices=[6], layers=32) == []  # 4 does not divide 6
    (only,) = microbatch_options(4, 4, 2, choices=[6, 8, 10], layers=9)
    assert only.overrides == "pipeline.microbatches=8"


def test_balance_of_even_and_uneven_layers():
    even = balance((2, 2, 2, 2), 4, layer_cost=3.0, edge_cost=0.75)
    assert even.imbalance == pytest.approx(0)
    assert even.shares == pytest.approx((0.25,) * 4)
    assert even.warning() is None
    uneven = balance((2, 2, 2, 1), 4)
    assert uneven.imbalance == pytest.approx(2 / 1.75 - 1)
    assert "stage 0 sets the pace, 14% above the mean" in uneven.warning()
    assert "7 layers divide by 1, 7" in uneven.warning()
    # each place a half of a stage's edges
    chunks = balance((1, 1, 1, 2), 2, edge_cost=2.0)
    assert chunks.shares == pytest.approx((4 / 9, 5 / 9))
    assert chunks.heaviest == 1
    assert chunks.imbalance == pytest.approx(3 / 2.25 - 1)
    assert balance((3, 3, 3, 0), 4).shares == pytest.approx((1 / 3,) * 3 + (0,))
