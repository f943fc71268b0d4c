"""A dense 15.8 B parameter model: the shape that MaxText publishes for 256 TPU v5e chips.

    python -m jaxdist.train --config dense_16b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config dense_16b:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config dense_16b --on v5e:16x16    # 8.7 GiB, MFU 58 %

The batch is six sequences on each of 256 devices. The .bin files hold token ids as uint16.
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 100_000  # 315 B tokens
    config.batch.global_size = 1536
    config.batch.sequence_length = 2048
    # 12 bytes a parameter, shared by all devices
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source = "bin"

    model = config.model
    model.vocab_size = 32_000
    model.num_layers, model.d_model, model.d_ff = 32, 4096, 28_672
    model.num_heads, model.num_kv_heads, model.head_dim = 64, 64, 128

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 3e-4, 0.1
    optimizer.warmup_steps = 2000

    config.checkpoint.every_steps = 1000
    return sized(config, size)
