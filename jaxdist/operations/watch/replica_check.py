"""Check by checksums that replicated arrays are the same on all devices.

In data parallelism, devices hold copies of the parameters and apply the same gradients.
If a chip computes wrongly, its copy drifts. Nothing else would show it.
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
    """Callback that compares replicas every `health.compare_every` steps."""

    keys = ("health.compare_every",)
    bucket = ""  # its time counts as part of the step

    def on_start(self, run: Run) -> None:
        """Reads the settings of the run."""
        self._run = run
        self.steps = run.config.health.compare_every
        self._policy = run.config.health.nonfinite
        self._equal_at = 0  # the last step whose replicas were equal

    def on_step(self, view: StepView) -> None:
        """Compares the replicas of the step's state.

        Raises:
          Diverged: the replicas differ.
        """
        if not self.steps or view.step % self.steps:
            return
        # a rollback may have gone behind that step
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
    """Checksums of replicated arrays, which the devices may still be computing."""

    sums: jax.Array  # uint32 [devices, arrays], fully replicated
    shardings: dict[str, NamedSharding]  # by array name, in the order of `sums`

    def differing(self) -> list[str]:
        """Waits for the checksums, and describes each device that differs from most.

        If two values of an array are equally frequent, all its devices are described.
        """
        mesh = next(iter(self.shardings.values())).mesh
        sums = np.asarray(self.sums).reshape(*mesh.devices.shape, -1)
        differing: dict[Any, list[str]] = {}
        for index, (name, sharding) in enumerate(self.shardings.items()):
            sums_PR = _by_part(sums[..., index], sharding)
            devices_PR = _by_part(mesh.devices, sharding)
            for replicas, holders in zip(sums_PR, devices_PR, strict=True):
                values, counts = np.unique(replicas, return_counts=True)
                usual = values[counts == counts.max()]
                is_tie = len(usual) > 1
                for device in holders[(replicas != usual[0]) | is_tie]:
                    differing.setdefault(device, []).append(name)
        texts = []
        for device, names in differing.items():
            text = f"device {device.id} of process {device.process_index}: {names[0]}"
            if len(names) > 1:
                text += f" and {len(names) - 1} more"
            texts.append(text)
        return texts


def _by_part(values: np.ndarray, sharding: NamedSharding) -> np.ndarray:
    """Arranges an array of the mesh's shape as [parts of the array, replicas]."""
    axes = _replica_axes(sharding)
    num_replicas = math.prod(values.shape[axis] for axis in axes)
    return np.moveaxis(values, axes, range(len(axes))).reshape(num_replicas, -1).T


def compare_replicas(state: Any) -> Comparison | None:
    """Starts to compute the checksums of a state's replicated arrays.

    All processes make this call. It does not wait for the devices.

    Returns:
      The checksums; None if no array is replicated.
    """
    replicated = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(state)
        if _replica_axes(leaf.sharding)
    }
    if not replicated:
        return None
    shardings = {name: leaf.sharding for name, leaf in replicated.items()}
    program = _sum_program(*shardings.values())
    return Comparison(program(*replicated.values()), shardings)


def _replica_axes(sharding: NamedSharding) -> list[int]:
    """Lists the dims of the mesh along which devices hold the same values."""
    used: set[Any] = set()
    for entry in sharding.spec:
        used |= set(entry) if isinstance(entry, tuple) else {entry}
    sizes = sharding.mesh.shape
    return [d for d, axis in enumerate(sizes) if axis not in used and sizes[axis] > 1]


@functools.lru_cache(maxsize=2)
def _sum_program(*shardings: NamedSharding) -> Callable[..., jax.Array]:
    """Builds the program that computes the checksums of each device's parts."""
    mesh = shardings[0].mesh

    def local_sums(*parts: jax.Array) -> jax.Array:
        return jnp.stack([fingerprint.array_sum(part) for part in parts])[None]

    by_device = jax.shard_map(
        local_sums,
        mesh=mesh,
        in_specs=tuple(sharding.spec for sharding in shardings),
        out_specs=P(mesh.axis_names),
        check_vma=False,
    )
    whole = NamedSharding(mesh, P())
    return jax.jit(by_device, out_shardings=whole)
