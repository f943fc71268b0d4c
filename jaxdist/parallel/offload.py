"""The host's memory as a place for state that a step needs only once."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax

HOST = "pinned_host"  # the memory kind that a device reads by itself


@dataclass(frozen=True)
class OffloadConfig:
    """What waits in the host's memory while layers run (activations:
    remat.policy=offload:NAME).
    """

    # moments and moving average there; the update brings over a layer at a time
    optimizer: bool = False


def device_faults(config: OffloadConfig, device: jax.Device) -> Iterator[str]:
    """Yields that a device cannot read its host's memory."""
    kinds = [memory.kind for memory in device.addressable_memories()]
    # a described device tells none
    if config.optimizer and kinds and HOST not in kinds:
        yield (
            f"offload.optimizer: {device.platform} devices ({device.device_kind}) have no memory of kind "
            f"{HOST}, only {', '.join(kinds)}; leave it off, or raise mesh.fsdp: each device then holds less"
        )


def on_host(x: jax.Array) -> bool:
    """Checks whether an array, or a value of a traced function, lies in the host's
    memory.
    """
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(x: jax.Array) -> jax.Array:
    """Returns x in the device's memory: what computes takes nothing else."""
    return jax.device_put(x, jax.memory.Space.Device) if on_host(x) else x


def to_host(x: jax.Array) -> jax.Array:
    """Returns x in the host's memory."""
    return jax.device_put(x, jax.memory.Space.Host)
