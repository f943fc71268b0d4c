"""jaxdist.train, whose probe finds that the second process's host memory is slow. It
probes at each interval.
"""

import sys

import jax

from jaxdist import train
from jaxdist.config import command_line
from jaxdist.operations.watch import probe

measure = probe.Bench.measure


def measure_slowly(bench: probe.Bench):
    seconds = measure(bench)
    if jax.process_index() == 1:
        seconds["memory"][""] *= 50  # beyond the noise of a shared machine
    return seconds


if __name__ == "__main__":
    probe._REST = 0.0
    probe.Bench.measure = measure_slowly
    sys.exit(command_line.quiet_pipe(train.main))
