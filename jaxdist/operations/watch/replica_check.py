"""Checks that devices which should hold the same values do, by checksums.

Data parallelism keeps copies of the parameters and adds up gradients once for all of
them. A chip that computes wrongly lets its copy drift, and nothing else would show it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.checkpoint import fingerprint
from jaxdist.trainer.callbacks import Callback, Run, StepView
from jaxdist.trainer.health import Diverged


class ReplicaCheck(Callback):
    """Compares the copies on devices, each `health.compare_every` steps."""

    keys = ("health.compare_every",)
    bucket = ""  # a part of the step

    def on_start(self, run: Run) -> None:
        """Takes how often to compare."""
        self._run = run
        self.steps = run.config.health.compare_every
        self._policy = run.config.health.nonfinite
        self._equal_at = 0  # the last step whose copies were equal

    def on_step(self, view: StepView) -> None:
        """Compares the copies of a step's state.

        Raises:
          Diverged: they differ.
        """
        if view.step % self.steps:
            return
        # a rollback may have gone behind it
        self._equal_at = min(self._equal_at, view.step - 1)
        comparison = compare_replicas(view.state)
        devices = comparison.differing() if comparison else []
        if not devices:
            self._equal_at = view.step
            return
        text = (
            f"step {view.step}: copies on devices differ (bad hardware?): "
            f"{'; '.join(devices)}"
        )
        self._run.event("drift", view.step, differing=devices)
        self._run.note(text)
        raise Diverged(
            "drift",
            text,
            first=self._equal_at + 1,
            last=view.step,
            policy=self._policy,
        )


class Comparison(NamedTuple):
    """Checksums, under way, of arrays that several devices hold copies of."""

    sums: jax.Array  # uint32 [devices, arrays], whole on every process
    shardings: dict[str, NamedSharding]  # by the array's name, in order

    def differing(self) -> list[str]:
        """Names each device whose copy is not that of most; waits for the devices."""
        mesh = next(iter(self.shardings.values())).mesh
        sums = np.asarray(self.sums).reshape(*mesh.devices.shape, -1)
        differing: dict[Any, list[str]] = {}
        for number, (name, sharding) in enumerate(self.shardings.items()):
            free = _free_axes(sharding)
            copies = math.prod(mesh.devices.shape[dim] for dim in free)
            tables = sums[..., number], mesh.devices
            columns = (
                np.moveaxis(table, free, range(len(free))).reshape(copies, -1).T
                for table in tables
            )
            for column, holders in zip(*columns, strict=True):
                kinds, counts = np.unique(column, return_counts=True)
                most = kinds[counts == counts.max()]
                # a tie names all
                for device in holders[(column != most[0]) | (len(most) > 1)]:
                    differing.setdefault(device, []).append(name)
        texts = []
        for device, names in differing.items():
            text = f"device {device.id} of process {device.process_index}: {names[0]}"
            if len(names) > 1:
                text += f" and {len(names) - 1} more"
            texts.append(text)
        return texts


def compare_replicas(state: Any) -> Comparison | None:
    """Computes checksums of each device's part of a state; None if nothing is
    replicated.

    Every process makes the call. It does not wait for the devices.
    """
    copied = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
        if _free_axes(leaf.sharding)
    }
    if not copied:
        return None
    shardings = {name: leaf.sharding for name, leaf in copied.items()}
    return Comparison(_summing(*shardings.values())(*copied.values()), shardings)


def _free_axes(sharding: NamedSharding) -> list[int]:
    """Lists the dims of the mesh along which devices hold the same values."""
    used: set[Any] = set()
    for entry in sharding.spec:
        used |= set(entry) if isinstance(entry, tuple) else {entry}
    sizes = sharding.mesh.shape
    return [d for d, axis in enumerate(sizes) if axis not in used and sizes[axis] > 1]


@functools.lru_cache(maxsize=2)
def _summing(*shardings: NamedSharding) -> Callable[..., jax.Array]:
    mesh = shardings[0].mesh
    local = jax.shard_map(
        lambda *parts: jnp.stack([fingerprint.array_sum(part) for part in parts])[None],
        mesh=mesh,
        in_specs=tuple(s.spec for s in shardings),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(local, out_shardings=NamedSharding(mesh, P()))
