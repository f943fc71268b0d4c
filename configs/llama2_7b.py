"""Llama 2 7B (arXiv:2307.09288), pretraining: 6.74 B parameters, 4 M tokens a step.

    python -m jaxdist.train --config llama2_7b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config llama2_7b:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config llama2_7b --on a100:4x8    # 58.1 GiB, MFU 48 %

The .bin files hold token ids as uint16 (32,000 tokens fit).
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 477_000  # 2 T tokens
    config.batch.global_size = 1024
    config.batch.sequence_length = 4096
    # 12 bytes a parameter, shared by all devices
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source = "bin"

    model = config.model
    model.vocab_size = 32_000
    model.num_layers, model.d_model, model.d_ff = 32, 4096, 11_008
    model.num_heads, model.num_kv_heads, model.head_dim = 32, 32, 128

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 3e-4, 0.1
    optimizer.warmup_steps, optimizer.eps = 2000, 1e-5

    config.checkpoint.every_steps = 1000
    return sized(config, size)
