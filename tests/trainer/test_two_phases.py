"""Short sequences first, then long ones over several devices: to the end, and through
kill -9.
"""

import numpy as np
import pytest

from jaxdist.checkpoint.folders import read_step
from jaxdist.telemetry.metrics import read_rows
from support.runs import final_arrays, losses, train, train_and_kill, untimed

STEPS = 60
SHORT = {"data__packing": "documents", "train__steps": STEPS}
LONG = SHORT | {
    "batch__sequence_length": 256,
    "batch__accumulation": 2,
    "data__balance": "attention",
    "mesh__context": 2,
    "mesh__fsdp": 2,
    "mesh__data": 1,
    "model__rope_scaling": "yarn",
    "model__rope_factor": 8.0,
    "model__rope_original_positions": 32,
}


@pytest.mark.slow
def test_long_sequences_go_on_from_short_ones_and_a_killed_run_resumes_bitwise(
    tmp_path,
):
    train(tmp_path / "short", **SHORT)
    learned = losses(tmp_path / "short")[STEPS]
    long = LONG | {"init__from_run": tmp_path / "short"}
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    done = train(straight, 4, **long)
    assert "attention by heads" in done.stdout
    assert "attention work, largest over mean" in done.stdout
    train_and_kill(killed, 45, 4, **long)
    assert "resumed after step" in train(killed, 4, **long).stdout

    rows = read_rows(straight).train
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    # begun with what the first run had learned
    assert rows[0]["loss"] < learned + 1 < np.log(256)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert any(row["attention_imbalance"] > 1 for row in rows)
    assert (
        read_step(straight / "checkpoints", STEPS).metadata["progress"]["step"] == STEPS
    )
    assert untimed(read_rows(killed)) == untimed(read_rows(straight))
    one, other = (final_arrays(folder, STEPS) for folder in (straight, killed))
    assert one.keys() == other.keys()
    assert len(one) > 20
    assert all(np.array_equal(one[name], other[name]) for name in one)
