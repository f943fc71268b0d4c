"""Llama 2 70B (arXiv:2307.09288), pretraining: 68.98 B parameters, 4 M tokens a step.

    python -m jaxdist.train --config llama2_70b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config llama2_70b:tiny    # the same family in a CPU minute
    python -m jaxdist.train --config llama2_70b:a100x64 --config.data.path='tokens/*.bin'
    python -m jaxdist.plan --config llama2_70b --on h100:16x8    # 59.1 GiB, MFU 50 %
    python -m jaxdist.plan --config llama2_70b:a100x64 --on a100:8x8    # 53.7 GiB, MFU 39 %

`:a100x64` is a layout for 64 A100 of 80 GB: tensor 8 within a host, two pipeline stages, and fsdp 4 at
ZeRO 1, with one sequence a microbatch. Its batch has 512 sequences, its rate falls from 3e-4 to 3e-5.
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
    if size == "a100x64":
        return for_64_a100(config)
    return sized(config, size)


def for_64_a100(config):
    config.train.steps = 954_000  # 2 T tokens
    config.batch.global_size = 512
    config.mesh.tensor, config.mesh.pipeline, config.mesh.fsdp = 8, 2, 4
    config.mesh.zero = 1
    config.pipeline.microbatches = 128  # one sequence each

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 3e-4, 0.1
    optimizer.weight_decay, optimizer.clip_norm = 0.1, 1.0
    optimizer.schedule = "cosine"

    config.checkpoint.keep_last = 5
    return config
