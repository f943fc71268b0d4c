"""Token generation in one program: prefill, then one token at a time against a cache.

The model must have two methods. `init_cache(B, S)` makes a cache of S slots per row.
`decode(tokens_BT, cache) -> (logits_BTV, cache)` reads T tokens. The program sets
`cache.length` [B] back to drop the slots beyond it, so prompts of unequal length are
padded on the right.

Two more attributes are optional. `max_length` is the longest sequence. `prefill(tokens_BP,
empty cache) -> cache` reads long prompts as training does. With `prefill`, devices of the
mesh axis `context` split the slots of the cache; without it each has whole sequences.

Shapes: B rows (prompts, padded to a size that the mesh divides), P prompt, M new tokens,
V vocabulary.
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
from jaxdist.models.cache import Cache
from jaxdist.parallel import execution
from jaxdist.parallel.axes import SEQUENCE_AXES
from jaxdist.parallel.sharding import Rules
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.step.train_step import TrainStep

_SMALLEST_BUCKET = 16  # tokens; shorter prompts and answers share one compiled program
# shortest prompt in tokens that `prefill` reads: one tile of the TPU's attention kernel
_MIN_PREFILL = 128
_NO_TOKEN = -1


@dataclass(frozen=True)
class SamplingConfig:
    """Settings for drawing the next token: temperature, then top_k, then top_p."""

    # divisor of the logits; 0 = always the likeliest token
    temperature: NonNegativeFloat = 1.0
    # number of likeliest tokens to draw from, and those that tie with the last; 0 = all
    top_k: NonNegativeInt = 0
    # probability that the likeliest tokens to draw from must reach together; 1 = all
    top_p: Annotated[float, Interval(gt=0, le=1)] = 1.0
    # ids that end a text; () = only the length ends it
    end_tokens: tuple[int, ...] = ()


class Generation(NamedTuple):
    """The tokens that follow one prompt."""

    tokens: np.ndarray  # [at most M] int32, without the end token
    ended: bool  # whether an end token ended the text, and not the length


class TokenGenerator:
    """A function that continues prompts with a model on a mesh.

    It compiles once for each `SamplingConfig` and each bucket of sizes. Buckets are
    powers of two of rows, prompt lengths and answer lengths. The cache is split like
    activations: rows over the batch axes, slots over context, kv heads over tensor.

    Args:
      spec: the model.
      mesh: the devices.
      rules: the sharding rules by which weights are stored.
      compute: the compute dtype.
    """

    def __init__(
        self, spec: ModelSpec, mesh: Mesh, rules: Rules, *, compute: str = "float32"
    ) -> None:
        splits_sequences = hasattr(spec.model_class, "prefill")

        def activation_rules(rules: Rules) -> Rules:
            return rules if splits_sequences else rules.inside(SEQUENCE_AXES)

        self._mesh = mesh
        self._longest = longest_text(spec)
        self._rules = activation_rules(rules)

        def run(weights: Weights, *inputs: jax.Array, **sizes: Any) -> _Output:
            weights, weight_rules = laid_out(spec, weights, mesh, rules, compute)
            with execution.activate(
                mesh, activation_rules(weight_rules), compute=compute
            ):
                return _generate(spec.assemble(*weights), *inputs, **sizes)

        replicated = NamedSharding(mesh, P())
        self._run = jax.jit(
            run,
            static_argnames=("room", "capacity", "sampling"),
            out_shardings=replicated,
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

        The key of a draw depends on the seed, the sample number and the position in the
        text. So neither the mesh nor the other prompts of the call change a text.

        Args:
          weights: (trainable, model state, frozen), as stored.
          prompts: token ids, at least one per prompt.
          max_tokens: largest number of new tokens, M.
          sampling: settings for drawing tokens.
          seed: seed of the draws.
          samples: a sample number per prompt. Equal prompts with unequal numbers get
            independent draws. Default: 0, 1, ...

        Raises:
          ConfigError: a prompt is empty, a text exceeds the model's longest sequence,
            or a setting is invalid.
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
        lengths_B = np.ones(B, np.int32)
        lengths_B[: len(rows)] = [row.size for row in rows]
        samples_B = np.resize(numbers, B).astype(np.int32)
        inputs = placed((prompts_BP, lengths_B, samples_B), self._mesh, self._rules)
        scalars = (np.int32(len(rows)), np.int32(max_tokens), np.uint32(seed % 2**32))
        capacity = round_up(
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


def writes_text(spec: ModelSpec) -> bool:
    """Checks whether a model has `decode`, and does not deny that it writes text.

    A model whose options decide has a property `writes_text`.
    """
    if not hasattr(spec.model_class, "decode"):
        return False
    return bool(getattr(spec.abstract_model, "writes_text", True))


def text_generator(
    spec: ModelSpec, built: TrainStep, *, compute: str
) -> TokenGenerator | None:
    """Makes the generator of a run's model, or None if the model writes no text.

    Args:
      spec: the model.
      built: the run's step, for its mesh and its sharding rules.
      compute: precision.compute of the run.
    """
    if not writes_text(spec):
        return None
    return TokenGenerator(spec, built.mesh, built.rules, compute=compute)


# --- the program ----------------------------------------------------------------------


# chosen tokens [B, M] int32, tokens chosen in each row [B] int32, whether the row has
# ended [B] bool
_Output = tuple[jax.Array, jax.Array, jax.Array]


class _Carry(NamedTuple):
    """The values that the loop carries from token to token."""

    step: jax.Array  # int32: tokens chosen so far in rows that have not ended
    last_B: jax.Array  # int32: newest token of each row, not in the cache yet
    cache: Any
    chosen_BM: jax.Array  # int32
    counts_B: jax.Array  # int32: tokens chosen in each row
    done_B: jax.Array  # bool: whether the row has ended


def _check_slots(model: Any, cache: Any, capacity: int) -> None:
    """Checks that a decoder's cache has a slot for each token.

    The generator pads prompts and sets the length of the cache back. A slot is then
    overwritten, but a state that sums up tokens would keep the padding. A cache of one
    slot more shows which arrays have slots.

    Raises:
      ConfigError: a mixer keeps a state instead of slots.
    """
    if not isinstance(cache, Cache):
        return
    batch_size = len(cache.length)
    longer = jax.eval_shape(lambda: model.init_cache(batch_size, capacity + 1))
    arrays = jax.tree.leaves(cache.stacks)
    for array, more in zip(arrays, jax.tree.leaves(longer.stacks), strict=True):
        if array.shape == more.shape:
            raise ConfigError(
                f"a mixer of model.layer_pattern keeps an array {array.shape} in place of a slot for each token. "
                f"Generation pads prompts and sets the cache back behind them, which only slots allow. "
                f"Score texts instead, or give the mixer a cache of slots."
            )


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
) -> _Output:
    """Generates up to `max_tokens` tokens for the first `num_rows` rows."""
    B = prompts_BP.shape[0]
    key = jax.random.key(seed)
    end_tokens = jnp.asarray(sampling.end_tokens or (_NO_TOKEN,), jnp.int32)
    keys_B = jax.vmap(lambda sample: jax.random.fold_in(key, sample))(samples_B)
    # All tokens of a prompt but its last go into the cache at once. Their logits are
    # not used, so XLA does not compute them.
    cache = model.init_cache(B, capacity)
    _check_slots(model, cache, capacity)
    if hasattr(model, "prefill") and prompts_BP.shape[1] >= _MIN_PREFILL:
        cache = model.prefill(prompts_BP, cache)
    else:
        _, cache = model.decode(prompts_BP, cache)
    cache = cache._replace(length=lengths_B - 1)
    last_B = jnp.take_along_axis(prompts_BP, lengths_B[:, None] - 1, axis=1)[:, 0]

    def unfinished(carry: _Carry) -> jax.Array:
        return (carry.step < max_tokens) & ~carry.done_B.all()

    def one_token(carry: _Carry) -> _Carry:
        logits, cache = model.decode(carry.last_B[:, None], carry.cache)
        position_keys_B = jax.vmap(jax.random.fold_in)(keys_B, cache.length)
        token_B = choose(logits[:, 0], position_keys_B, sampling)
        chosen_BM = jax.lax.dynamic_update_slice(
            carry.chosen_BM, token_B[:, None], (jnp.int32(0), carry.step)
        )
        return _Carry(
            step=carry.step + 1,
            last_B=token_B,
            cache=cache,
            chosen_BM=chosen_BM,
            counts_B=carry.counts_B + ~carry.done_B,
            done_B=carry.done_B | jnp.isin(token_B, end_tokens),
        )

    is_padding_B = jnp.arange(B) >= num_rows
    start = _Carry(
        step=jnp.int32(0),
        last_B=last_B,
        cache=cache,
        chosen_BM=jnp.zeros((B, room), jnp.int32),
        counts_B=jnp.zeros(B, jnp.int32),
        done_B=is_padding_B,
    )
    end = jax.lax.while_loop(unfinished, one_token, start)
    return end.chosen_BM, end.counts_B, end.done_B


def choose(
    logits_BV: jax.Array, keys_B: jax.Array, sampling: SamplingConfig
) -> jax.Array:
    """Draws one token per row, [B] int32, with the key of the row."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    allowed_BV = restrict(logits_BV / sampling.temperature, sampling)
    # The vocabulary is gathered first, so that one device draws a row's token.
    allowed_BV = execution.shard(allowed_BV, "batch", None)
    return jax.vmap(jax.random.categorical)(keys_B, allowed_BV).astype(jnp.int32)


def restrict(logits_BV: jax.Array, sampling: SamplingConfig) -> jax.Array:
    """Sets the logits that top_k and then top_p (arXiv:1904.09751) exclude to -inf.

    Tokens that tie with the last allowed one stay, so their order does not matter.
    """
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        kth_B1 = jax.lax.top_k(logits_BV, sampling.top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV < kth_B1, -jnp.inf, logits_BV)
    if sampling.top_p < 1:
        sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        probabilities_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probabilities_BV, axis=-1) - probabilities_BV
        kept_BV = jnp.where(before_BV < sampling.top_p, sorted_BV, jnp.inf)
        lowest_B1 = kept_BV.min(-1, keepdims=True)
        logits_BV = jnp.where(logits_BV < lowest_B1, -jnp.inf, logits_BV)
    return logits_BV


# --- inputs and outputs ---------------------------------------------------------------


def longest_text(spec: ModelSpec) -> int | None:
    """Finds the model's longest sequence in tokens; None if it has no limit."""
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
    longest_prompt = max((row.size for row in rows), default=0)
    if longest is not None and longest_prompt + max_tokens > longest:
        faults.append(
            f"a prompt of {longest_prompt} tokens and max_tokens={max_tokens} exceed the model's longest "
            f"sequence of {longest}; lower max_tokens or shorten the prompt"
        )
    if faults:
        raise ConfigError(faults)


def padded(rows: Sequence[np.ndarray], batch_size: int, width: int) -> np.ndarray:
    """Joins rows of tokens into one int32 array [B, W], with zeros right and below."""
    padded_BW = np.zeros((batch_size, width), np.int32)
    for padded_W, row in zip(padded_BW, rows, strict=False):
        padded_W[: row.size] = row
    return padded_BW


def bucket(size: int, smallest: int = _SMALLEST_BUCKET) -> int:
    """Rounds a size up to a power of two, so that few sizes are compiled."""
    return max(smallest, 1 << (size - 1).bit_length())


def round_up(size: int, divisor: int) -> int:
    """Rounds a size up to a multiple of `divisor`."""
    return -(-size // divisor) * divisor


def placed(arrays: Sequence[np.ndarray], mesh: Mesh, rules: Rules) -> list[jax.Array]:
    """Puts host arrays [B, ...] on the devices, with rows split over the batch axes."""
    specs = [rules.activation(("batch", None)[: x.ndim], x.shape) for x in arrays]
    return [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip(arrays, specs, strict=True)
    ]


def until_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Cuts a text before the first of `stops`.

    Returns:
      The text, and whether it contained a stop.
    """
    positions = [text.find(stop) for stop in stops if stop]
    found = [position for position in positions if position >= 0]
    if not found:
        return text, False
    return text[: min(found)], True
