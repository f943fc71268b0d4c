"""Latent attention, experts and multi-token prediction through kill -9: the same run bit
for bit, and its losses on another layout.
"""

import shutil

import numpy as np
import pytest

from jaxdist.models.multi_token import LOSS
from jaxdist.telemetry.metrics import read_rows
from support.runs import (
    TINY,
    final_arrays,
    losses,
    train,
    train_and_kill,
    untimed,
)

STEPS = TINY["train.steps"]
KILLED_AFTER = 50
MODEL = {
    "model__layer_pattern": "latent",
    "model__qk_norm": "none",
    "model__latent__query_rank": 24,
    "model__latent__kv_rank": 16,
    "model__latent__nope_dim": 16,
    "model__latent__rope_dim": 8,
    "model__latent__value_dim": 12,
    "model__num_layers": 3,
    "model__first_dense_layers": 1,
    "model__num_experts": 4,
    "model__expert_d_ff": 16,
    "model__multi_token__depth": 2,
    "data__packing": "documents",
    "precision__compute": "float32",
    "mesh__data": 1,
}
LAYOUT = {"mesh__fsdp": 2, "mesh__expert": 2}
OTHER = {"mesh__pipeline": 2, "mesh__context": 2, "context__attention": "gather"}


@pytest.mark.slow
def test_a_killed_run_resumes_bitwise_and_on_another_layout(tmp_path):
    straight = tmp_path / "straight"
    killed = tmp_path / "killed"
    moved = tmp_path / "moved"
    train(straight, 4, **MODEL, **LAYOUT)
    train_and_kill(killed, KILLED_AFTER, 4, **MODEL, **LAYOUT)
    shutil.copytree(killed, moved)
    assert "resumed after step" in train(killed, 4, **MODEL, **LAYOUT).stdout
    assert "resumed after step" in train(moved, 4, **MODEL, **OTHER).stdout

    rows = read_rows(straight).train
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for name in ("loss", LOSS):
        assert rows[-1][name] < rows[0][name] - 0.1, "it learns"
    assert untimed(read_rows(killed)) == untimed(read_rows(straight))
    expected = final_arrays(straight)
    found = final_arrays(killed)
    assert expected.keys() == found.keys()
    assert sum("multi_token/depth_2" in name for name in expected) > 20
    assert sum("choice_bias" in name for name in expected) == 3
    assert all(np.array_equal(found[name], x) for name, x in expected.items())

    steps = range(KILLED_AFTER, STEPS + 1)
    before = losses(straight)
    after = losses(moved)
    assert any(before[step] != after[step] for step in steps), "another layout"
    np.testing.assert_allclose(
        [after[step] for step in steps], [before[step] for step in steps], rtol=1e-5
    )
