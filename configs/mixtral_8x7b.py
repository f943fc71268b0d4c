"""Mixtral 8x7B (arXiv:2401.04088), pretraining at 4,096 tokens: 46.70 B parameters, a token uses 12.88 B.

    python -m jaxdist.train --config mixtral_8x7b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config mixtral_8x7b:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config mixtral_8x7b --on v5p:4x4x4    # 39.1 GiB, MFU 55 %

The batch is twelve sequences on each of 64 devices. The .bin files hold token ids as uint16 (32,000 tokens fit).
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 100_000  # 315 B tokens
    config.batch.global_size = 768
    config.batch.sequence_length = 4096
    # 12 bytes a parameter, shared by all devices
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source = "bin"

    model = config.model
    model.vocab_size = 32_000
    model.num_layers, model.d_model, model.d_ff = 32, 4096, 14_336
    model.num_heads, model.num_kv_heads, model.head_dim = 32, 8, 128
    model.rope_theta = 1_000_000.0
    model.num_experts, model.experts_per_token = 8, 2
    # The loss of the batch, as in this family: the file format has no place for a bias
    # of the choice.
    model.balance, model.balance_weight = "batch", 0.02

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 3e-4, 0.1
    optimizer.warmup_steps = 2000

    config.checkpoint.every_steps = 1000
    return sized(config, size)
