"""Descriptions of GPUs with which XLA compiles for them without a GPU.

A description is a GpuTargetConfigProto in text form.
"""

from jaxdist.hardware import chips

# By family: compute capability, multiprocessors, float32 units of a multiprocessor,
# shared memory of a multiprocessor (KiB), L2 (MiB), boost clock (GHz), and memory as
# the device reports it (bytes). Sources: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability"; NVIDIA's architecture whitepapers. Source of
# the memory: device queries in openxla/xla, xla/backends/gpu/target_config/specs, and
# for GPUs that it lacks what torch.cuda.get_device_properties prints (of the L4 no
# printout was found: its memory is not checked). Some builds of the plugin lack XLA's
# own descriptions, so they are not used.
_GPUS: dict[str, tuple[tuple[int, int], int, int, int, float, float, int]] = {
    "a100-40gb": ((8, 0), 108, 64, 164, 40, 1.41, 42_331_013_120),
    "a100": ((8, 0), 108, 64, 164, 40, 1.41, 85_100_068_864),
    "a100-40gb-pcie": ((8, 0), 108, 64, 164, 40, 1.41, 42_331_013_120),
    "a100-pcie": ((8, 0), 108, 64, 164, 40, 1.41, 79_050_250_240),
    "h100": ((9, 0), 132, 128, 228, 50, 1.98, 84_942_979_072),
    "h100-pcie": ((9, 0), 114, 128, 228, 50, 1.755, 84_942_979_072),
    "h200": ((9, 0), 132, 128, 228, 50, 1.98, 151_397_597_184),
    "b200": ((10, 0), 148, 128, 228, 126.5, 1.965, 191_514_411_008),
    "gb200": ((10, 0), 152, 128, 228, 129.25, 2.062, 197_897_748_480),
    "rtx4090": ((8, 9), 128, 128, 100, 72, 2.52, 25_756_172_288),
    "l4": ((8, 9), 58, 128, 100, 48, 2.04, 23_794_286_592),
    "a10g": ((8, 6), 80, 128, 100, 6, 1.71, 23_684_186_112),
    "t4": ((7, 5), 40, 64, 64, 4, 1.59, 15_835_594_752),
    "v100-16gb": ((7, 0), 80, 64, 96, 6, 1.53, 16_935_682_048),
    "v100": ((7, 0), 80, 64, 96, 6, 1.53, 34_089_205_760),
    "v100-16gb-pcie": ((7, 0), 80, 64, 96, 6, 1.38, 16_935_682_048),
    "v100-pcie": ((7, 0), 80, 64, 96, 6, 1.38, 34_089_205_760),
}
# most threads of a multiprocessor by compute capability; all others have 2048
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536}

# Software of the machine. Without these four versions, XLA assumes that the machine is
# too old for 8-bit floats and silently computes their matmuls in bfloat16.
_SOFTWARE = {
    "runtime_version": "12.9.1",
    "driver_version": "12.9.1",
    "compile_time_toolkit_version": "12.9.1",
    "dnn_version": "9.10.0",
}

# limits that all of these GPUs have in common
_LIMITS = (
    "threads_per_block_limit: 1024 threads_per_warp: 32 "
    "shared_memory_per_block: 49152 registers_per_core_limit: 65536 registers_per_block_limit: 65536 "
    "block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 "
    "thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64"
)


def gpu_description(chip: chips.Chip) -> str:
    """Formats the description of a GPU that has a family."""
    capability, cores, units, shared, l2, clock, memory = _GPUS[chip.family]
    major, minor = capability
    threads = _THREADS.get(capability, 2048)
    # sm_90a and later, which have Hopper's instructions
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    # Since Ampere the system reserves one KiB of each block.
    reserved = 1 if major >= 8 else 0
    software = " ".join(f'{name}: "{version}"' for name, version in _SOFTWARE.items())
    return (
        f"gpu_device_info {{ {_LIMITS} threads_per_core_limit: {threads} "
        f"shared_memory_per_core: {shared * 1024} "
        f"shared_memory_per_block_optin: {(shared - reserved) * 1024} "
        f"core_count: {cores} fpus_per_core: {units} clock_rate_ghz: {clock} "
        f"l2_cache_size: {int(l2 * 2**20)} device_memory_size: {memory} "
        f"memory_bandwidth: {int(chip.hbm_bytes_per_s)} {software} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }} }} "
        f'platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} '
        f'device_description_str: "{chip.device_kinds[0]}"'
    )
