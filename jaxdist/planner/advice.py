"""What would make a run smaller: edits of its config, the cheapest first, each with its saving.

A saving is the difference of two accounts of `planner.memory`, so it costs no compile. Nothing that
changes the losses goes without saying so.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jaxdist.config import ConfigError
from jaxdist.parallel import axes, remat
from jaxdist.parallel.mesh import MeshShape
from jaxdist.parallel.sharding import Rules
from jaxdist.planner import memory, targets
from jaxdist.planner.compiler import CannotTell
from jaxdist.planner.targets import Target
from jaxdist.protocols.model_spec import ModelSpec
from jaxdist.trainer import build
from jaxdist.trainer.run_config import RunConfig

MIN_SAVING = 0.01  # of the peak: what saves less is no advice
SAFE_SHARE = 0.95  # of the capacity: what an account may be off by is left free


@dataclass(frozen=True)
class Edit:
    """A change of the config, or of the hardware."""

    override: str  # "a.b=value c.d=value", each to follow `--config.`; "" for other hardware
    saves_bytes: int  # per device, by arithmetic
    cost_note: str
    enough: bool | None = None  # whether it fits then, by arithmetic; None: capacity not given
    checked: bool | None = None  # whether the compiler says that it fits; None: not asked
    peak_bytes: int | None = None  # the compiler's, if asked and it fits
    on: str = ""  # larger hardware, as `--on` takes it

    @property
    def words(self) -> str:
        """The edit as typed on the command line."""
        return f"--on {self.on}" if self.on else " ".join(f"--config.{w}" for w in self.override.split())


def edits(
    run: RunConfig,
    spec: ModelSpec,
    rules: Rules,
    target: Target,
    components: Mapping[str, int],
    *,
    needed_bytes: int | None = None,
    capacity_bytes: int | None = None,
) -> list[Edit]:
    """Returns the edits that save memory, the cheapest first; one that joins several if none is enough.

    Args:
      components: of the run as it is.
      needed_bytes: the compiler's peak where it is known; savings are taken off the larger of both.
      capacity_bytes: what a device has; None: nothing is said of `enough`.
    """
    peak = memory.accounted_peak(components)
    # The compiler's number may be of a program that it could not finish, so lower than the peak.
    short = max(peak, needed_bytes or 0) - int(SAFE_SHARE * capacity_bytes) if capacity_bytes else None
    found: list[Edit] = []

    @functools.cache
    def saving(override: str) -> int | None:
        return _bytes_saved(run, target, override, peak)

    for override, note in _candidates(run, rules.shape, short, saving):
        saves = saving(override)
        if saves is not None and saves >= MIN_SAVING * peak:
            found.append(Edit(override, saves, note, None if short is None else saves >= short))
    found += _larger_hardware(run, target, peak, short)
    if short and short > 0 and not any(edit.enough for edit in found if edit.override):
        found = [*_combined(run, target, found, peak, short), *found]
    return found


def check(
    run: RunConfig, edits: Sequence[Edit], compile: Callable[[RunConfig], int | None], most: int = 3
) -> list[Edit]:
    """Returns the edits, the first of them compiled in order until one fits.

    Args:
      compile: returns the compiler's peak of a run that fits, None of one that does not; may raise
        CannotTell, and then nothing is said of the edit.
      most: compiles at most.
    """
    found = list(edits)
    promising = [i for i, edit in enumerate(found) if edit.override and edit.enough is not False]
    for i in (promising or [i for i, edit in enumerate(found) if edit.override])[:most]:
        try:
            peak = compile(_edited(run, found[i].override))
        except (ConfigError, CannotTell):
            continue
        found[i] = replace(found[i], checked=peak is not None, peak_bytes=peak)
        if peak is not None:
            break
    return found


def _edited(run: RunConfig, override: str) -> RunConfig:
    """Returns the run with an edit's override; values are as the candidates below write them."""
    for word in override.split():
        path, text = word.split("=", 1)
        value = {"true": True}.get(text, int(text) if text.lstrip("-").isdecimal() else text)
        section, field = path.split(".")
        if section == "model":
            run = replace(run, model={**run.model, field: value})
        else:
            run = replace(run, **{section: replace(getattr(run, section), **{field: value})})
    return run


# --- candidates -----------------------------------------------------------------------------------


def _bytes_saved(run: RunConfig, target: Target, override: str, peak: int) -> int | None:
    """Returns what an override saves; None if the run is then not legal."""
    try:
        edited = _edited(run, override)
        _, rules, spec = targets.validate_for(edited, target)
    except ConfigError:
        return None
    return peak - memory.accounted_peak(memory.components(edited, spec, rules, target))


def _candidates(
    run: RunConfig, shape: MeshShape, short: int | None, saving: Callable[[str], int | None]
) -> Iterator[tuple[str, str]]:
    """Yields (override, what it costs), the cheapest first."""

    def one_of(override: Callable[[int], str], sizes: Sequence[int]) -> int | None:
        """Returns the first size that is enough, or else the one that saves most."""
        savings = {n: s for n in sizes if (s := saving(override(n))) is not None}
        enough = [n for n, s in savings.items() if short is not None and s >= short]
        return enough[0] if enough else max(savings, key=savings.__getitem__, default=None)

    sizes = shape.sizes
    if sizes["data"] > 1 and run.mesh.zero:
        yield "mesh.data=1 mesh.fsdp=-1", "same losses; shards are gathered from more devices"
    if sizes["tensor"] > 1 and not run.mesh.sequence_parallel:
        yield "mesh.sequence_parallel=true", "same losses, same bytes on the wire"
    yield from _smaller_parts(run, shape, one_of)
    yield from _stronger_remat(run, sizes["pipeline"] > 1)
    chunk = run.model.get("loss_chunk")
    if chunk is not None and (chunk == 0 or chunk > 256):
        yield "model.loss_chunk=256", "same losses; smaller products in the loss"
    for axis in reversed(axes.TABLE):  # what splits least of the program first
        options = [n for n in (2, 4, 8, 16) if sizes[axis.name] < n <= axis.advised_up_to]
        size = one_of(f"mesh.{axis.name}={{}} mesh.fsdp=-1 mesh.data=1".format, options)
        if size:
            yield f"mesh.{axis.name}={size} mesh.fsdp=-1 mesh.data=1", axis.advice
    if run.mesh.zero < 3:
        yield "mesh.zero=3", "same losses; weights are gathered in every layer, forward and backward"
    if run.remat.policy == "full" and sizes["pipeline"] == 1:
        yield f"remat.policy=offload:{remat.INPUT}", "same losses; layer inputs go to the host and back"
    if run.optimizer.momentum_dtype == "float32":
        yield "optimizer.momentum_dtype=bfloat16", "CHANGES THE LOSSES a little: momentum is rounded"
    if run.precision.params == "float32":
        yield "precision.params=bfloat16", "CHANGES THE LOSSES: small updates are lost"
    if run.batch.global_size % 2 == 0:
        yield f"batch.global_size={run.batch.global_size // 2}", "CHANGES THE LOSSES: half the batch a step"


def _smaller_parts(run: RunConfig, shape: MeshShape, one_of) -> Iterator[tuple[str, str]]:
    flow, parts = build.num_microbatches(run, shape), run.batch.accumulation
    each = run.batch.global_size // (parts * flow * shape.batch_shards)
    factors = axes.divisors(each)[1:]
    if flow > 1:
        factor = one_of(lambda n: f"pipeline.microbatches={flow * n}", factors)
        if factor:
            yield f"pipeline.microbatches={flow * factor}", "same losses, less bubble; smaller products"
        return
    factor = one_of(lambda n: f"batch.accumulation={parts * n}", factors)
    if factor:
        yield (
            f"batch.accumulation={parts * factor}",
            f"same losses; weights are gathered {factor} x as often, products are smaller",
        )


def _stronger_remat(run: RunConfig, staged: bool) -> Iterator[tuple[str, str]]:
    field, policy = ("pipeline.remat", run.pipeline.remat) if staged else ("remat.policy", run.remat.policy)
    forward_again = "same losses; up to +33 % compute, as the forward pass runs twice"
    if policy == "none" and not staged:
        yield "remat.policy=dots", "same losses; element-wise work and little else runs twice"
    if policy not in ("full", "layers"):
        yield f"{field}=full", forward_again if not staged else "same losses; layers run a third time"


def _combined(run: RunConfig, target: Target, found: Sequence[Edit], peak: int, short: int) -> list[Edit]:
    """Returns the edits taken together, in order, until they are enough; [] if they never are."""
    taken: dict[str, str] = {}
    best, notes = 0, list[str]()
    for edit in found:
        words = dict(word.split("=", 1) for word in edit.override.split())
        if not words or taken.keys() & words.keys():
            continue
        override = " ".join(f"{name}={value}" for name, value in (taken | words).items())
        saves = _bytes_saved(run, target, override, peak)
        if saves is None or saves <= best:
            continue
        taken, best, notes = taken | words, saves, [*notes, edit.cost_note]
        if best >= short:
            return [Edit(override, best, "; ".join(dict.fromkeys("; ".join(notes).split("; "))), True)]
    return []


def _larger_hardware(run: RunConfig, target: Target, peak: int, short: int | None) -> list[Edit]:
    """Returns the next larger hardware of the family that takes the run."""
    family, _, sizes = target.text.partition(":")
    dims = [int(n) for n in sizes.split("x")]
    order = sorted(range(len(target.shape)), key=lambda i: dims[i]) if target.chip else ()
    for dim in (1, 0) if target.platform == "gpu" else order:  # more GPUs of a host, then more hosts
        grown = [n * (2 if i == dim else 1) for i, n in enumerate(dims)]
        try:
            larger = targets.parse(f"{family}:{'x'.join(map(str, grown))}")
        except ConfigError:
            continue
        saves = _bytes_saved(run, larger, "", peak)
        if saves is not None and saves >= MIN_SAVING * peak:
            factor = math.ceil(larger.num_chips / target.num_chips)
            note = f"same losses; {factor} x the chips"
            return [Edit("", saves, note, None if short is None else saves >= short, on=larger.text)]
    return []
