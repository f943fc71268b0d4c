"""Text from a model: prefill, then token by token against a sharded cache, in one
program.

The model gives `init_cache(B, S)` and `decode(tokens_BT, cache) -> (logits_BTV,
cache)`, where `cache.length` [B] may be set back: what lies beyond it is never read. So
prompts of unequal length are padded on the right. A model with a longest sequence says
so as `max_length`. A model may have `prefill(tokens_BP, empty cache) -> cache`, too,
which reads long prompts as training does; then devices of the mesh axis `context` may
share out the cache's slots, and else each of them has whole sequences.

Shapes: B rows (prompts, padded to what the mesh divides), P prompt, M new tokens, V
vocabulary.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from annotated_types import Interval
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.config import ConfigError, schema
from jaxdist.config.annotations import NonNegativeFloat, NonNegativeInt
from jaxdist.inference.weights import Weights, laid_out
from jaxdist.parallel import execution
from jaxdist.parallel.axes import SEQUENCE_AXES
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.train_step import TrainStep

_SMALLEST_BUCKET = 16  # tokens; shorter prompts and answers share one compiled program
# tokens of a prompt from which on attention as in training pays: a tile of the TPU's
# kernel
_LONG = 128
_NO_TOKEN = -1


@dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen: temperature, then top_k, then top_p."""

    # logits are divided by it; 0 = always the likeliest token
    temperature: NonNegativeFloat = 1.0
    # only the k likeliest tokens, ties with the last included; 0 = all
    top_k: NonNegativeInt = 0
    # only the likeliest tokens that together reach this probability; 1 = all
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    # ids, each of which ends a text; (): only the length does
    end_tokens: tuple[int, ...] = ()


class Generation(NamedTuple):
    """What followed one prompt."""

    tokens: np.ndarray  # [at most M] int32, without the end token
    ended: bool  # by an end token, not by the length


class TokenGenerator:
    """Continues prompts with a model on a mesh.

    It compiles once for each bucket of sizes (powers of two of rows, prompt and answer
    lengths) and each `SamplingConfig`. The cache is split like activations: rows over
    the batch axes, slots over context, kv heads over tensor.
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, rules: Rules, *, compute: str = "float32"
    ) -> None:
        # or each device has whole sequences, as in the cache
        splits = hasattr(spec.model_class, "prefill")
        self._mesh = mesh
        self._longest = longest_text(spec)
        self._rules = rules if splits else rules.inside(SEQUENCE_AXES)

        def run(*args, **sizes):
            weights, by = laid_out(spec, args[0], mesh, rules, compute)
            with execution.activate(
                mesh, by if splits else by.inside(SEQUENCE_AXES), compute=compute
            ):
                return _generate(spec.assemble(*weights), *args[1:], **sizes)

        whole = NamedSharding(mesh, P())
        self._run = jax.jit(
            run, static_argnames=("room", "capacity", "sampling"), out_shardings=whole
        )

    def __call__(
        self,
        weights: Weights,
        prompts: Sequence[Sequence[int] | np.ndarray],
        *,
        max_tokens: int,
        sampling: SamplingConfig = SamplingConfig(),
        seed: int = 0,
        samples: Sequence[int] | None = None,
    ) -> list[Generation]:
        """Continues each prompt.

        A token is drawn with a key made of (seed, sample, position in its text), so
        neither the mesh nor the other prompts of the call change it.

        Args:
          prompts: token ids, each at least one.
          max_tokens: new tokens at most, M.
          samples: the prompts' sample numbers, distinct for distinct draws; default 0,
            1, ...

        Raises:
          ConfigError: an empty prompt, a text beyond the model's longest, illegal
            settings.
        """
        rows = [np.asarray(prompt, np.int32) for prompt in prompts]
        numbers = np.arange(len(rows)) if samples is None else np.asarray(samples)
        _check(rows, numbers, max_tokens, self._longest, sampling)
        if not rows:
            return []
        longest = sys.maxsize if self._longest is None else self._longest
        shards = self._rules.shape.batch_shards
        room = bucket(max_tokens)
        B = shards * bucket(-(-len(rows) // shards), smallest=1)
        width = min(bucket(max(row.size for row in rows)), longest)
        prompts_BP = padded(rows, B, width)
        lengths_B = np.array(
            [row.size for row in rows] + [1] * (B - len(rows)), np.int32
        )
        samples_B = np.resize(numbers, B).astype(np.int32)
        inputs = placed((prompts_BP, lengths_B, samples_B), self._mesh, self._rules)
        scalars = np.int32(len(rows)), np.int32(max_tokens), np.uint32(seed % 2**32)
        capacity = divided(
            min(width + room, longest), self._rules.shape.sizes["context"]
        )
        sizes = {"room": room, "capacity": capacity, "sampling": sampling}
        tokens, counts, ended = jax.device_get(
            self._run(weights, *inputs, *scalars, **sizes)
        )
        return [
            Generation(tokens[i, : counts[i] - ended[i]], bool(ended[i]))
            for i in range(len(rows))
        ]


def text_generator(
    spec: ModelSpec, built: TrainStep, *, compute: str
) -> TokenGenerator | None:
    """Makes the generator that continues prompts with the model of a run.

    Args:
      compute: precision.compute of the run.

    Returns:
      None if the model has no `decode`.
    """
    if not hasattr(spec.model_class, "decode"):
        return None
    return TokenGenerator(spec, built.mesh, built.rules, compute=compute)


# --- the program ----------------------------------------------------------------------


class _Progress(NamedTuple):
    """What the loop carries."""

    step: jax.Array  # int32: tokens chosen so far in the rows that still run
    last_B: jax.Array  # int32: the token that is not yet in the cache
    cache: Any
    chosen_BM: jax.Array  # int32
    counts_B: jax.Array  # int32: tokens chosen in each row
    done_B: jax.Array


def _generate(
    model: Any,
    prompts_BP: jax.Array,
    lengths_B: jax.Array,
    samples_B: jax.Array,
    num_rows: jax.Array,
    max_tokens: jax.Array,
    seed: jax.Array,
    *,
    room: int,
    capacity: int,
    sampling: SamplingConfig,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the chosen tokens [B, M], how many of them count [B], whether the end was
    met [B].
    """
    B = prompts_BP.shape[0]
    key = jax.random.key(seed)
    end_tokens = jnp.asarray(sampling.end_tokens or (_NO_TOKEN,), jnp.int32)
    keys_B = jax.vmap(lambda sample: jax.random.fold_in(key, sample))(samples_B)
    # All but each row's last token go in at once; nobody reads these logits, so XLA
    # drops them.
    cache = model.init_cache(B, capacity)
    fills = hasattr(model, "prefill") and prompts_BP.shape[1] >= _LONG
    cache = (
        model.prefill(prompts_BP, cache)
        if fills
        else model.decode(prompts_BP, cache)[1]
    )
    cache = cache._replace(length=lengths_B - 1)
    last_B = jnp.take_along_axis(prompts_BP, lengths_B[:, None] - 1, axis=1)[:, 0]

    def unfinished(now: _Progress) -> jax.Array:
        return (now.step < max_tokens) & ~now.done_B.all()

    def one_token(now: _Progress) -> _Progress:
        logits, cache = model.decode(now.last_B[:, None], now.cache)
        position_keys_B = jax.vmap(jax.random.fold_in)(keys_B, cache.length)
        token_B = choose(logits[:, 0], position_keys_B, sampling)
        chosen_BM = jax.lax.dynamic_update_slice(
            now.chosen_BM, token_B[:, None], (jnp.int32(0), now.step)
        )
        counts_B = now.counts_B + ~now.done_B
        done_B = now.done_B | jnp.isin(token_B, end_tokens)
        return _Progress(now.step + 1, token_B, cache, chosen_BM, counts_B, done_B)

    padding_B = jnp.arange(B) >= num_rows
    zeros_B = jnp.zeros(B, jnp.int32)
    start = _Progress(
        jnp.int32(0), last_B, cache, jnp.zeros((B, room), jnp.int32), zeros_B, padding_B
    )
    end = jax.lax.while_loop(unfinished, one_token, start)
    return end.chosen_BM, end.counts_B, end.done_B


def choose(
    logits_BV: jax.Array, keys_B: jax.Array, sampling: SamplingConfig
) -> jax.Array:
    """Returns one token a row, [B] int32, drawn with the row's own key."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    allowed_BV = restrict(logits_BV / sampling.temperature, sampling)
    # Drawn where the whole vocabulary lies, so that a row's draw is one device's work.
    allowed_BV = execution.shard(allowed_BV, "batch", None)
    return jax.vmap(jax.random.categorical)(keys_B, allowed_BV).astype(jnp.int32)


def restrict(logits_BV: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Returns the logits with -inf where top_k, then top_p (arXiv:1904.09751), rule a
    token out.

    Tokens that tie with the last one allowed stay, so ranks among equals don't matter.
    """
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kth_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        shares_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(shares_BV, axis=-1) - shares_BV
        kept_BV = jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf)
        lowest_B1 = kept_BV.min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)
    return logits_BV


# --- what goes in ---------------------------------------------------------------------


def longest_text(spec: ModelSpec) -> int | None:
    """Returns the most tokens that the model takes; None: no limit."""
    return getattr(spec.abstract_model, "max_length", None)


def _check(
    rows: list[np.ndarray],
    samples: np.ndarray,
    max_tokens: int,
    longest: int | None,
    sampling: SamplingConfig,
) -> None:
    faults = schema.faults(sampling)
    if samples.shape != (len(rows),):
        faults.append(
            f"{samples.size} sample numbers for {len(rows)} prompts; give one a prompt"
        )
    if max_tokens < 1:
        faults.append(f"max_tokens={max_tokens}: must be >= 1")
    empty = [i for i, row in enumerate(rows) if not row.size]
    faults += [f"prompt {i} is empty; give it at least one token" for i in empty]
    most = max((row.size for row in rows), default=0)
    if longest is not None and most + max_tokens > longest:
        faults.append(
            f"a prompt of {most} tokens and max_tokens={max_tokens} exceed the model's longest "
            f"sequence of {longest}; lower max_tokens or shorten the prompt"
        )
    if faults:
        raise ConfigError(faults)


def padded(rows: Sequence[np.ndarray], batch_size: int, width: int) -> np.ndarray:
    """Returns rows of tokens as one int32 array [B, W], with zeros to the right and
    below.
    """
    padded_BW = np.zeros((batch_size, width), np.int32)
    for padded_W, row in zip(padded_BW, rows, strict=False):
        padded_W[: row.size] = row
    return padded_BW


def bucket(size: int, smallest: int = _SMALLEST_BUCKET) -> int:
    """Returns the power of two at or above `size`, so that few sizes are compiled."""
    return max(smallest, 1 << (size - 1).bit_length())


def divided(size: int, parts: int) -> int:
    """Returns the multiple of `parts` at or above `size`, so that devices can share it
    out.
    """
    return -(-size // parts) * parts


def placed(arrays: Sequence[np.ndarray], mesh: Mesh, rules: Rules) -> list[jax.Array]:
    """Returns host arrays [B, ...] on the devices, rows over the batch axes."""
    specs = [rules.activation(("batch", None)[: x.ndim], x.shape) for x in arrays]
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Returns the text before the first stop in it, and whether there was one."""
    ends = [at for stop in stops if stop and (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text, bool(ends)
