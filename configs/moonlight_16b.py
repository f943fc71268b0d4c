"""Moonlight-16B-A3B (arXiv:2502.16982), pretraining with Muon at 8,192 tokens: 15.96 B parameters, a token uses 2.91 B.

    python -m jaxdist.train --config moonlight_16b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config moonlight_16b:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config moonlight_16b:tiny --on cpu:1    # 0.14 GiB
    python -m jaxdist.plan --config moonlight_16b --on v5p:4x4x4    # 8.6 GiB, MFU 34 %

The family is DeepSeek-V3's, without a latent of queries and without groups of experts. The .bin files hold
token ids as uint32 (163,840 tokens do not fit in uint16).
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 340_000  # 5.7 T tokens
    config.batch.global_size = 2048
    config.batch.sequence_length = 8192
    config.batch.accumulation = 32  # one sequence at a time on 64 devices
    # 8 bytes a parameter, shared by all devices
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source, config.data.bin_dtype = "bin", "uint32"

    model = config.model
    model.vocab_size = 163_840
    model.num_layers, model.d_model, model.d_ff = 27, 2048, 11_264
    model.layer_pattern, model.num_heads = ("latent",), 16
    latent = model.latent
    latent.query_rank, latent.kv_rank = 0, 512
    latent.nope_dim, latent.rope_dim, latent.value_dim = 128, 64, 128
    model.norm_eps, model.rope_theta = 1e-5, 50_000.0
    model.num_experts, model.experts_per_token, model.expert_d_ff = 64, 6, 1408
    model.num_shared_experts, model.first_dense_layers = 2, 1
    model.scores, model.route_scale = "sigmoid", 2.446
    model.balance, model.balance_rate = "bias", 1e-3

    optimizer = config.optimizer
    optimizer.name, optimizer.muon_update_rms = "muon", 0.2
    optimizer.other_learning_rate_ratio = 1.0
    optimizer.learning_rate, optimizer.final_learning_rate = 4.2e-4, 0.1
    optimizer.warmup_steps = 2000

    config.checkpoint.every_steps = 1000
    return sized(config, size)
