"""Float fields [B, S] and [B, S, k] reach the head with their tokens, on every layout.

They come with the data, or an objective prepares them. Values are whole numbers below
2^24, and a batch has 2^n targets: sums are exact.
"""

import jax
import numpy as np
import pytest

from jaxdist.data.balance import Balancer, StepGrid
from jaxdist.data.loader import Loader
from jaxdist.data.user_batches import open_user_batches
from jaxdist.models.transformer import Transformer
from jaxdist.protocols.objective import NextToken
from jaxdist.step.batch_parts import dim_names
from support.models import FAST_COMPILE
from support.objectives import MODEL, B, Case, S, build, case, spec_for
from support.packed_documents import dataset_of

K = 3
PLACES = 100.0 * np.arange(K)[None, None, :]


class Checked(Transformer):
    """A transformer whose loss has terms that say what its head was given."""

    sums_over_samples = True

    def head(self, x, batch):
        """Adds sums of the float fields, and by how much these differ from tokens."""
        loss = super().head(x, batch)
        tokens, each, several = batch["tokens"], batch["each"], batch["several"]
        aux = {
            "each": each.sum(),
            "several": several.sum(),
            "of_first_half": each[:, : S // 2].sum(),
            "misplaced_each": abs(each - tokens).sum(),
            "misplaced_several": abs(several - (tokens[..., None] + PLACES)).sum(),
        }
        return loss._replace(aux=aux)


class Echo(NextToken):
    """Prepares the float fields from the tokens."""

    def prepare(self, modules, batch):
        tokens = batch["tokens"].astype("float32")
        return {"each": tokens, "several": tokens[..., None] + PLACES}


CASES = {
    "one device": case(),
    "accumulation": case({"data": 2, "fsdp": 2}, accumulation=4),
    "once": case({"data": 2}, accumulation=2, reduce="once"),
    "heads": case({"context": 2, "tensor": 2}, attention="heads"),
    "gather": case({"context": 4}, accumulation=2, attention="gather"),
    "ring": case({"context": 4, "data": 2}, attention="ring"),
    "two stages": case({"pipeline": 2, "fsdp": 2}, accumulation=2),
    "four stages": case({"pipeline": 4, "context": 2}, attention="heads"),
    "stages, once": case({"pipeline": 2, "data": 2}, accumulation=2, reduce="once"),
}
# Data and objective go the same way from where the batch is cut up.
PREPARED = ("accumulation", "gather", "two stages")
# By default each way of cutting up a batch is tried once: parts with packed rows, below,
# and a sequence in whole pieces, as `heads` has it, by `gather`.
OF_DATA = ("ring",)
OF_OBJECTIVE = ("gather",)


def marked(names, default):
    return [
        name if name in default else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


def batch_of_tokens() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    ids = random.integers(0, MODEL.vocab_size, (B, S + 1), dtype=np.int32)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": np.ones((B, S), np.float32),
        "positions": np.tile(np.arange(S, dtype=np.int32), (B, 1)),
        "sample": np.arange(B, dtype=np.int32),
    }


def with_floats(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tokens = batch["tokens"].astype(np.float32)
    return batch | {"each": tokens, "several": tokens[..., None] + np.float32(PLACES)}


def check(on: Case, batch: dict[str, np.ndarray], objective=NextToken()) -> None:  # noqa: B008 (frozen)
    """Asserts that evaluation and step find the floats of each token at the head."""
    built = build(spec_for(objective, model_class=Checked), on)
    placed = jax.device_put(batch, built.batch_shardings(batch))
    state = built.init.lower().compile(FAST_COMPILE)()
    evaluate = built.evaluate.lower(state, placed).compile(FAST_COMPILE)
    _, count, others = evaluate(state, placed)
    step = built.step.lower(state, placed).compile(FAST_COMPILE)
    _, metrics = step(state, placed)
    tokens = batch["tokens"].astype(np.float64)
    wanted = {
        "each": tokens.sum(),
        "several": K * tokens.sum() + tokens.size * PLACES.sum(),
        "of_first_half": tokens[:, : S // 2].sum(),
        "misplaced_each": 0,
        "misplaced_several": 0,
    }
    assert wanted["several"] > wanted["each"] > wanted["of_first_half"] > 0
    assert count == batch["weights"].sum() > 0
    for term, value in wanted.items():
        assert float(others[f"aux/{term}"][0]) == value, term
        assert float(metrics[f"aux/{term}"]) == np.float32(value) / count, term


@pytest.mark.parametrize("name", marked(CASES, OF_DATA))
def test_fields_of_the_data_reach_the_head_with_their_tokens(name):
    check(CASES[name], with_floats(batch_of_tokens()))


@pytest.mark.parametrize("name", marked(PREPARED, OF_OBJECTIVE))
def test_prepared_fields_reach_the_head_with_their_tokens(name):
    check(CASES[name], batch_of_tokens(), Echo())


def test_prepared_fields_are_those_of_packed_rows_in_their_new_places(tmp_path):
    on = case({"data": 2}, accumulation=2)
    lengths = np.random.default_rng(1).integers(2, 3 * S, 200).tolist()
    dataset = dataset_of(tmp_path, lengths, S)
    balancer = Balancer(dataset, B, StepGrid(2, 1, 2), balanced=True)
    order = balancer.order(0)
    assert not np.array_equal(order, np.arange(B))
    batch = dataset.train_batch(0, B, order)
    assert batch["segment_ids"].max() > 1
    check(on, batch, Echo())


def test_context_splits_every_field_of_tokens():
    built = build(spec_for(NextToken(), model_class=Checked), CASES["gather"])
    batch = with_floats(batch_of_tokens())
    placed = jax.device_put(batch, built.batch_shardings(batch))
    dims = {name: x.addressable_shards[0].data.shape[1:] for name, x in placed.items()}
    assert dims["tokens"] == dims["each"] == (S // 4,)
    assert dims["several"] == (S // 4, K)
    assert dims["sample"] == ()


def test_a_field_without_tokens_has_no_sequence():
    image = np.zeros((B, 8, 8), np.float32)
    assert dim_names({"image": image})["image"] == ("batch", None, None)
    beside = dim_names({"image": image, "tokens": np.zeros((B, S))})
    assert beside["image"] == ("batch", None, None)
    assert dim_names({"label": np.zeros(B)}) == {"label": ("batch",)}


def test_a_loader_that_resumes_gives_the_same_floats():
    rows = with_floats(batch_of_tokens())
    given = {name: x for name, x in rows.items() if name != "sample"}
    dataset, size = open_user_batches(given, size=4)
    on = case({"data": 2, "context": 2})
    built = build(spec_for(NextToken(), model_class=Checked), on)
    where = built.batch_shardings({name: x[:size] for name, x in rows.items()})

    def batches(start: int, end: int) -> list[dict[str, np.ndarray]]:
        with Loader(dataset, global_size=size, shardings=where, start=start) as loader:
            return [jax.device_get(next(loader)) for _ in range(start, end)]

    whole, resumed = batches(0, 6), batches(3, 6)
    for one, other in zip(whole[3:], resumed, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    for batch in whole:
        np.testing.assert_array_equal(batch["each"], batch["tokens"])
        np.testing.assert_array_equal(batch["several"][..., 0], batch["tokens"])
