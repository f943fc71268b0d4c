"""Llama 3 8B (arXiv:2407.21783), pretraining at 8,192 tokens: 8.03 B parameters.

    python -m jaxdist.train --config llama3_8b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config llama3_8b:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config llama3_8b --on h100:1x8    # 45.1 GiB, MFU 48 %

The .bin files hold token ids as uint32 (128,256 tokens do not fit in uint16). The batch is one that
eight GPUs of 80 GB hold; the paper's is 512 sequences, later 1,024: `--config.batch.global_size`.
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 100_000  # 52 B tokens
    config.batch.global_size = 64
    config.batch.sequence_length = 8192
    config.batch.accumulation = 1
    # 12 bytes a parameter, shared by all devices
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source, config.data.bin_dtype = "bin", "uint32"

    model = config.model
    model.vocab_size = 128_256
    model.num_layers, model.d_model, model.d_ff = 32, 4096, 14_336
    model.num_heads, model.num_kv_heads, model.head_dim = 32, 8, 128
    # As pretrained. Llama 3.1's stretch to 131,072 tokens is rope_factor=8 beside the
    # defaults.
    model.rope_theta, model.rope_factor = 500_000.0, 1.0

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 3e-4, 0.1
    optimizer.warmup_steps = 2000

    config.checkpoint.every_steps = 1000
    return sized(config, size)
