"""Before a long run: each device's matmul rate and the all-reduce of all, and which device is slow.

`python -m jaxdist.resilience.preflight`, on the processes of a run; `launch --preflight` starts it.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.distributed import coordination, initialize
from jaxdist.hardware import chips

_TRIES, _CHAIN = 5, 16  # measurements, of which the best counts; matmuls in each

Rate = float | None  # a second; None: unknown


def main() -> int:
    """Prints the table on process 0; returns 0."""
    initialize.prepare()
    kind, is_cpu = jax.devices()[0].device_kind, jax.devices()[0].platform == "cpu"
    chip = chips.chip_for(kind)
    size, num_bytes, dtype = (512, 1 << 20, "float32") if is_cpu else (8192, 1 << 28, "bfloat16")
    mine = {str(d.id): matmul_rate(d, size, jnp.dtype(dtype)) for d in jax.local_devices()}
    rates = coordination.gather(mine, timeout_s=600)
    bandwidth = all_reduce_rate(num_bytes)
    if jax.process_index() == 0:
        peak = chip.peak(dtype) if chip else None
        links = chip.link_bytes_per_s * chip.num_links if chip else None
        print("\n".join(lines(rates, f"{kind}, {dtype} {size}^3", peak, bandwidth, links)), flush=True)
    return 0


def matmul_rate(device: jax.Device, size: int, dtype: jnp.dtype) -> float:
    """Returns the FLOP/s of square matmuls on a device."""
    x = jax.device_put(np.full((size, size), 1 / size, dtype), device)
    chain = jax.jit(lambda a, b: lax.fori_loop(0, _CHAIN, lambda _, y: y @ b, a))
    return 2 * size**3 * _CHAIN / _best_s(lambda: chain(x, x))


def all_reduce_rate(num_bytes: int) -> float | None:
    """Returns the bytes/s of each device's links in an all-reduce of all, as a ring; None for one device."""
    devices = jax.devices()
    if len(devices) == 1:
        return None
    mesh = Mesh(np.asarray(devices), ("all",))
    where = NamedSharding(mesh, P("all"))
    ones = jax.jit(lambda: jnp.ones((len(devices), num_bytes // 4), jnp.float32), out_shardings=where)()
    reduce = jax.jit(jax.shard_map(lambda x: lax.psum(x, "all"), mesh=mesh, in_specs=P("all"), out_specs=P()))
    return 2 * (len(devices) - 1) / len(devices) * num_bytes / _best_s(lambda: reduce(ones))


def _best_s(run: Callable[[], jax.Array]) -> float:
    seconds = []
    for _ in range(_TRIES + 1):  # the first compiles
        began = time.perf_counter()
        run().block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def lines(
    rates: Mapping[int, Mapping[str, float]], what: str, peak: Rate, bandwidth: Rate, links: Rate
) -> list[str]:
    """Returns the table, and a line for each device that is slow.

    Args:
      rates: FLOP/s by process and device.
      what: was measured.
      peak: FLOP/s of a device by the hardware table; None: unknown.
      bandwidth, links: bytes/s of a device's links in the all-reduce, and by the table; None: unknown.
    """
    usual = statistics.median(rate for devices in rates.values() for rate in devices.values())
    out, slow = [f"preflight: {what}, median {usual / 1e12:.3g} TFLOP/s"], []
    for process, devices in sorted(rates.items()):
        for device, rate in devices.items():
            share = f", {rate / peak:.0%} of the table's {peak / 1e12:.3g}" if peak else ""
            text = f"process {process} device {device}: {rate / 1e12:.3g} TFLOP/s{share}"
            out.append(f"  {text}")
            if rate < 0.8 * usual:  # no healthy chip is so much slower than its neighbours
                slow.append(f"slow: {text}, {rate / usual:.0%} of the median")
    if bandwidth is not None:
        table = f", {bandwidth / links:.0%} of all its links by the table" if links else ""
        out.append(f"  all-reduce: {bandwidth / 1e9:.3g} GB/s a device{table}")
    return out + (slow or ["  no device is slow beside the others"])


if __name__ == "__main__":
    sys.exit(main())
