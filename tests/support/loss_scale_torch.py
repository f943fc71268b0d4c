"""Writes tests/data/loss_scale/torch.json: what `torch.amp.GradScaler` does with a loss
scale.

    python tests/support/loss_scale_torch.py FILE          # torch; 2.15 made the file
    that is there

A loss linear in 4 weights over 8 samples: its gradients are sums of a few bits, so that
both sides agree exactly on what overflows float16. A row is of a step: kind, scale and
good steps after it, updates left out so far.
"""

import json
import sys
from typing import NamedTuple

import numpy as np

STEPS, SAMPLES, WIDTH, RATE = 16, 8, 4, 0.125


class Case(NamedTuple):
    """A run with a loss scale."""

    initial: float = 2.0**16
    interval: int = 3
    # step -> an input that makes its gradient overflow at a large scale
    spikes: dict[int, float] = {}
    clip: float = 0.0
    accumulation: int = 1
    dtype: str = "float16"


CASES = {
    "plain": Case(),
    "back off": Case(2.0**13, 5, {2: 2.0**7, 3: 2.0**9, 9: np.inf}),
    "clip": Case(2.0**12, 2, {5: 2.0**8}, clip=0.3),
    "accumulation": Case(2.0**12, 2, {6: 2.0**8, 12: 2.0**9}, accumulation=4),
    "start at 1": Case(1.0, 1),
    "ceiling": Case(2.0**125, 2, {9: 2.0**8}, dtype="float32"),
}


def inputs(case: Case) -> np.ndarray:
    """Returns each step's samples, [STEPS, SAMPLES, WIDTH]."""
    random = np.random.default_rng(0)
    x = random.integers(1, 9, (STEPS, SAMPLES, WIDTH)).astype(np.float32) / 16
    for step, value in case.spikes.items():
        x[step, 5, 1] = value
    return x


def run(case: Case) -> dict[str, list]:
    """Returns the rows of a run, and its last weights."""
    import torch

    weights, dtype = torch.zeros(WIDTH, requires_grad=True), getattr(torch, case.dtype)
    optimizer = torch.optim.SGD([weights], lr=RATE)
    scaler = torch.amp.GradScaler(
        "cpu", init_scale=case.initial, growth_interval=case.interval
    )
    rows, skipped = [], 0
    for x in inputs(case):
        optimizer.zero_grad()
        for part in range(case.accumulation):
            y = weights.to(dtype) * torch.tensor(x[part :: case.accumulation]).to(dtype)
            scaler.scale(y.float().sum(1).mean() / case.accumulation).backward()
        scaler.unscale_(optimizer)
        finite = bool(torch.isfinite(weights.grad).all())
        if case.clip:
            torch.nn.utils.clip_grad_norm_([weights], case.clip)
        before = weights.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert finite != bool(torch.equal(weights, before))
        skipped += not finite
        state = scaler.state_dict()
        kind = "good" if finite else "skipped"
        rows.append([kind, state["scale"], state["_growth_tracker"], skipped])
    return {"rows": rows, "weights": weights.tolist()}


if __name__ == "__main__":
    lines = [
        f"{json.dumps(name)}: {json.dumps(run(case))}" for name, case in CASES.items()
    ]
    with open(sys.argv[1], "w") as file:
        file.write("{\n" + ",\n".join(lines) + "\n}\n")
