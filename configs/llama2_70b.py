"""Llama 2 70B (arXiv:2307.09288), pretraining: 68.98 B parameters, 4 M tokens a step.

    python -m jaxdist.train --config llama2_70b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config llama2_70b:tiny    # the same family in a CPU minute

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
    model.num_layers, model.d_model, model.d_ff = 80, 8192, 28_672
    model.num_heads, model.num_kv_heads, model.head_dim = 64, 8, 128

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 1.5e-4, 0.1
    optimizer.warmup_steps, optimizer.eps = 2000, 1e-5

    config.checkpoint.every_steps = 1000
    return sized(config, size)
