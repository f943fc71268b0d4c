"""DeepSeek-V3 (arXiv:2412.19437), pretraining at 4,096 tokens: 671.03 B parameters, a token uses 37.55 B.

    python -m jaxdist.train --config deepseek_v3 --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config deepseek_v3:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config deepseek_v3:tiny --on cpu:1    # 0.11 GiB
    python -m jaxdist.plan --config deepseek_v3 --on tpu7x:4x8x8    # 58.7 GiB, MFU 16 %

The batch is that of the paper after its first phase. Positions are not stretched, and there is no
prediction of further tokens. The .bin files hold token ids as uint32 (129,280 tokens do not fit in uint16).
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 235_000  # 14.8 T tokens
    config.batch.global_size = 15_360
    config.batch.sequence_length = 4096
    config.batch.accumulation = 10  # three sequences at a time on 512 devices
    # 12 bytes a parameter, shared by all devices. A device gathers an eighth of a layer's
    # experts: all of them, with their gradients, would take more than 90 GiB.
    config.mesh.data, config.mesh.fsdp, config.mesh.expert = 1, -1, 8
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source, config.data.bin_dtype = "bin", "uint32"

    model = config.model
    model.vocab_size = 129_280
    model.num_layers, model.d_model, model.d_ff = 61, 7168, 18_432
    model.layer_pattern, model.num_heads = ("latent",), 128
    latent = model.latent
    latent.query_rank, latent.kv_rank = 1536, 512
    latent.nope_dim, latent.rope_dim, latent.value_dim = 128, 64, 128
    model.norm_eps, model.rope_theta, model.init_std = 1e-6, 10_000.0, 0.006
    model.num_experts, model.experts_per_token, model.expert_d_ff = 256, 8, 2048
    model.num_shared_experts, model.first_dense_layers = 1, 3
    model.scores, model.route_scale = "sigmoid", 2.5
    model.expert_groups, model.expert_top_groups = 8, 4
    model.balance, model.balance_rate = "bias", 1e-3

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 2.2e-4, 0.1
    optimizer.warmup_steps = 2000

    config.checkpoint.every_steps = 1000
    return sized(config, size)
