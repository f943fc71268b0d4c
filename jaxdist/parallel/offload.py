"""Offloading to the host's memory, for state that a step needs only once."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import jax

HOST = "pinned_host"  # the kind of host memory that a device reads directly


@dataclass(frozen=True)
class OffloadConfig:
    """Options of offloading; activations are offloaded by remat.policy=offload:NAME."""

    # keep moments and moving average in the host's memory; the update moves a layer at
    # a time to the device
    optimizer: bool = False
    # keep the parameters there, too, in precision.params; a step begins by copying them
    # to the device in precision.compute
    parameters: bool = False

    @property
    def parameters_in(self) -> str | None:
        """The memory kind where parameters wait; None = on the devices."""
        return HOST if self.parameters else None

    def faults(self) -> Iterator[str]:
        """Yields a message for each conflict of values, with its fix."""
        if self.parameters and not self.optimizer:
            yield (
                "offload.parameters=true, offload.optimizer=false: parameters wait beside their moments, and "
                "are updated with them; set offload.optimizer=true"
            )


def device_faults(config: OffloadConfig, device: jax.Device) -> Iterator[str]:
    """Yields a message if the device cannot read its host's memory."""
    # empty for a device that is only described
    kinds = [memory.kind for memory in device.addressable_memories()]
    if not kinds or HOST in kinds:
        return
    for name, is_on in dataclasses.asdict(config).items():
        if not is_on:
            continue
        yield (
            f"offload.{name}: {device.platform} devices ({device.device_kind}) have no memory of kind "
            f"{HOST}, only {', '.join(kinds)}; leave it off, or raise mesh.fsdp: each device then holds less"
        )


def on_host(x: jax.Array) -> bool:
    """Checks whether an array, or a traced value, is in the host's memory."""
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)


def to_device(x: jax.Array) -> jax.Array:
    """Moves x to the device's memory, the only one that ops read."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
    """Moves x to the host's memory."""
    moved: jax.Array = jax.device_put(x, jax.memory.Space.Host)
    return moved
