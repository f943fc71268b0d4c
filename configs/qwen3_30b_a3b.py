"""Qwen3-30B-A3B (arXiv:2505.09388), pretraining at 4,096 tokens: 30.53 B parameters, a token uses 3.35 B.

    python -m jaxdist.train --config qwen3_30b_a3b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config qwen3_30b_a3b:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config qwen3_30b_a3b --on v5p:4x4x4    # 15.9 GiB, MFU 34 %

The batch is four sequences on each of 64 devices. The .bin files hold token ids as uint32 (151,936 tokens do not fit in uint16).
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 100_000  # 105 B tokens
    config.batch.global_size = 256
    config.batch.sequence_length = 4096
    # 12 bytes a parameter, shared by all devices
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source, config.data.bin_dtype = "bin", "uint32"

    model = config.model
    model.vocab_size = 151_936
    model.num_layers, model.d_model, model.d_ff = 48, 2048, 6144
    model.num_heads, model.num_kv_heads, model.head_dim = 32, 4, 128
    model.qk_norm, model.norm_eps, model.rope_theta = "head", 1e-6, 1_000_000.0
    model.num_experts, model.experts_per_token, model.expert_d_ff = 128, 8, 768
    # The loss of the batch, as in the paper: the file format has no place for a bias of
    # the choice.
    model.balance, model.balance_weight = "batch", 1e-3

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 3e-4, 0.1
    optimizer.warmup_steps = 2000

    config.checkpoint.every_steps = 1000
    return sized(config, size)
