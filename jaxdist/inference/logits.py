"""Logits of whole sequences of token ids: the forward pass of training, without a loss.

The model needs a method `forward(batch) -> logits [B, S, V]`. The batch has the entries
`tokens`, `positions` and, if the caller gives some, `segment_ids`.

Shapes: B rows, S sequence length, V vocabulary.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxdist.config import ConfigError
from jaxdist.inference.decoding import longest_text, placed, round_up
from jaxdist.inference.weights import Weights, laid_out
from jaxdist.parallel import execution
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec

Ids = np.ndarray | jax.Array | Sequence[Sequence[int]]


class LogitsFunction:
    """A function that computes the logits of token ids with a model on a mesh.

    It compiles once for each shape of the ids. Rows are split over the batch axes.

    Args:
      spec: the model.
      mesh: the devices.
      rules: the sharding rules by which weights are stored.
      compute: the compute dtype.

    Raises:
      ConfigError: the model has no method `forward`.
    """

    def __init__(self, spec: ModelSpec, mesh: Mesh, rules: Rules, compute: str) -> None:
        self._name = spec.model_class.__name__
        if not callable(getattr(spec.model_class, "forward", None)):
            raise ConfigError(
                f"logits: {self._name} has no method forward(batch) -> logits [B, S, V]. "
                f"Add one, or call `model` as your code does."
            )
        self._mesh = mesh
        self._rules = rules
        self._longest = longest_text(spec)
        # None: a logit for each token of the vocabulary
        self._vocab_size: int | None = None
        model = spec.abstract_model
        if not getattr(model, "writes_text", True):
            self._vocab_size = model.config.vocab_size

        def run(
            weights: Weights, batch: Mapping[str, jax.Array], rows: int
        ) -> jax.Array:
            weights, weight_rules = laid_out(spec, weights, mesh, rules, compute)
            with execution.activate(mesh, weight_rules, compute=compute):
                logits: jax.Array = spec.assemble(*weights).forward(batch)
            return logits[:rows].astype(jnp.float32)

        self._run = jax.jit(run, static_argnames="rows")

    def __call__(
        self,
        weights: Weights,
        ids: Ids,
        *,
        positions: Ids | None = None,
        segment_ids: Ids | None = None,
    ) -> jax.Array:
        """Computes float32 logits [B, S, V].

        Args:
          weights: (trainable, model state, frozen), as stored.
          ids: token ids, integers [B, S].
          positions: position of each token in its document, integers [B, S]; default:
            0 to S - 1.
          segment_ids: documents of each row, integers [B, S]; a token sees tokens of
            its own document only. Default: a row is one document.

        Raises:
          ConfigError: an array has another shape or dtype, an id is no token of the
            model, a row is too long, or the model's `forward` gives no such logits. It
            lists all faults of the arrays.
        """
        given = {"tokens": ids, "positions": positions, "segment_ids": segment_ids}
        batch = {name: np.asarray(x) for name, x in given.items() if x is not None}
        faults = list(self._faults(batch))
        if faults:
            raise ConfigError(f"logits: {fault}" for fault in faults)
        rows, length = batch["tokens"].shape
        if positions is None:
            all_positions = np.arange(length, dtype=np.int32)
            batch["positions"] = np.broadcast_to(all_positions, (rows, length))
        size = round_up(rows, self._rules.shape.batch_shards)
        # Each added row repeats the last one; their logits are cut off.
        numbers = np.minimum(np.arange(size), rows - 1)
        arrays = [x[numbers].astype(np.int32) for x in batch.values()]
        inputs = dict(zip(batch, placed(arrays, self._mesh, self._rules), strict=True))
        vocabulary = self._vocabulary(weights, inputs, rows)
        faults = list(_range_faults("tokens", batch["tokens"], vocabulary))
        if faults:
            raise ConfigError(f"logits: {fault}" for fault in faults)
        logits: jax.Array = self._run(weights, inputs, rows=rows)
        return logits

    def _faults(self, batch: Mapping[str, np.ndarray]) -> Iterator[str]:
        """Yields the faults of the arrays that are known without the model's program."""
        tokens = batch["tokens"]
        for name, x in batch.items():
            if x.ndim != 2 or not x.size or x.dtype.kind not in "iu":
                hint = "; for one sequence give [ids]" if x.ndim == 1 else ""
                yield (
                    f"{name} is {x.dtype}{list(x.shape)}; required integers [B, S], at "
                    f"least one{hint}"
                )
            elif x.shape != tokens.shape:
                yield (
                    f"{name} is {list(x.shape)}, and the ids are {list(tokens.shape)}; "
                    f"required one number for each id"
                )
        if tokens.ndim != 2:
            return
        length = tokens.shape[1]
        if self._longest is not None and length > self._longest:
            yield (
                f"{length} tokens exceed the model's longest sequence of "
                f"{self._longest}; shorten the rows"
            )
        parts = self._rules.shape.sizes["context"]
        if length % parts:
            yield (
                f"mesh.context={parts} does not divide {length} tokens; give a multiple, "
                f"or load the run with another mesh"
            )
        positions = batch.get("positions")
        if positions is not None and positions.dtype.kind in "iu" and positions.size:
            limit = self._longest or np.iinfo(np.int32).max
            yield from _range_faults("positions", positions, limit)

    def _vocabulary(
        self, weights: Weights, batch: Mapping[str, jax.Array], rows: int
    ) -> int:
        """Traces the program and finds the size of the vocabulary.

        Raises:
          ConfigError: the model's `forward` needs other entries, or gives no logits.
        """
        try:
            output: Any = self._run.eval_shape(weights, batch, rows=rows)
        except KeyError as error:
            raise ConfigError(
                f"logits: {self._name}.forward reads batch[{error}], which is neither of "
                f"{', '.join(batch)}; call `model` as your code does"
            ) from error
        required = batch["tokens"].shape[1]
        if output.ndim != 3 or output.shape[:2] != (rows, required):
            raise ConfigError(
                f"logits: {self._name}.forward returned {list(output.shape)}; required "
                f"[B, S, V] with B={rows} and S={required}"
            )
        return self._vocab_size or int(output.shape[2])


def _range_faults(name: str, x: np.ndarray, size: int) -> Iterator[str]:
    """Yields a message if a number is outside of 0 to size - 1."""
    wrong = np.argwhere((x < 0) | (x >= size))
    if len(wrong):
        first = tuple(wrong[0].tolist())
        yield (
            f"{name}: {x[first]} at {list(first)} is outside of 0 to {size - 1} "
            f"({len(wrong)} such in all)"
        )
