"""A decoder of 0.85 M parameters learns Python from the standard library's sources, byte by byte.

    python -m jaxdist.train --config quickstart
    python -m jaxdist.plan --config quickstart --on cpu:1    # 0.08 GiB

About four minutes on two CPU cores.
"""

from jaxdist import default_config


def get_config():
    config = default_config()
    config.train.steps = 1700
    config.train.eval_every = 850
    config.checkpoint.every_steps = 200
    config.train.sample_tokens = 400
    config.train.sample_prompt = "def "
    config.batch.global_size = 16
    config.batch.sequence_length = 128
    config.data.validation_tokens = 131072

    model = config.model
    model.vocab_size = 256
    model.num_layers, model.d_model, model.d_ff = 4, 128, 384
    model.num_heads, model.num_kv_heads, model.head_dim = 4, 2, 32
    model.qk_norm = "head"
    model.zero_init_outputs = True

    optimizer = config.optimizer
    optimizer.name, optimizer.learning_rate = "muon", 0.01
    optimizer.other_learning_rate_ratio = 0.3
    optimizer.schedule, optimizer.decay_fraction = "wsd", 0.6
    return config
