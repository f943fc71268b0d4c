"""Pipeline schedules as data (numpy only): made, read, checked, compiled, simulated and drawn."""

from jaxdist.parallel.pipeline.schedules.balance import (
    Balance,
    Option,
    balance,
    bubble_fraction,
    microbatch_options,
)
from jaxdist.parallel.pipeline.schedules.program import (
    KINDS,
    Program,
    ScheduleRows,
    TickRun,
    Ticks,
    compile_schedule,
)
from jaxdist.parallel.pipeline.schedules.simulator import Costs, Simulation, draw_svg, simulate
from jaxdist.parallel.pipeline.schedules.table import (
    SCHEDULES,
    Schedule,
    ScheduleError,
    build_schedule,
    check,
    read_schedule,
    write_schedule,
)

__all__ = [
    "KINDS", "SCHEDULES", "Balance", "Costs", "Option", "Program", "Schedule", "ScheduleError",
    "ScheduleRows", "Simulation", "TickRun", "Ticks", "balance", "bubble_fraction", "build_schedule", "check",
    "compile_schedule", "draw_svg", "microbatch_options", "read_schedule",
    "simulate", "write_schedule",
]  # fmt: skip
