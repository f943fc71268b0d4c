"""GPT-2 small, 124 M parameters (Radford et al. 2019), with nanoGPT's training settings.

    python -m jaxdist.train --config gpt2_124m --config.data.path=train.bin
    python -m jaxdist.train --config gpt2_124m:tiny    # the same family in a CPU minute
    python -m jaxdist.plan --config gpt2_124m --on a100:1x1    # 15.6 GiB, MFU 43 %
    python -m jaxdist.plan --config gpt2_124m --on a100-40gb:1x1    # 15.6 GiB, MFU 39 %
    python -m jaxdist.plan --config gpt2_124m --on rtx4090:1x1    # 15.6 GiB, MFU 44 %
    python -m jaxdist.plan --config gpt2_124m --on a100:1x8 --config.batch.accumulation=1    # 15.6 GiB, MFU 43 %

One GPU of 20 GiB or more computes 64 of the 512 sequences at a time. A T4 or a V100 of 16 GB needs two
more settings: --config.precision.compute=float16 --config.batch.accumulation=16.
`train.bin` holds GPT-2 token ids as uint16, as nanoGPT's and llm.c's data scripts write them.
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 19_073  # 10 B tokens
    config.train.eval_every = 1000
    config.batch.global_size = 512
    config.batch.sequence_length = 1024
    # 64 sequences at a time
    config.batch.accumulation = 8
    config.precision.compute = "bfloat16"
    config.data.source = "bin"

    model = config.model
    # 50,257 tokens, a prime, rounded up to a multiple of 128: the table then splits
    # over tensor axes of 2, 4, ... 128, and fills matrix units. No target is ever one
    # of the 47 rows more.
    model.vocab_size = 50_304
    model.num_layers, model.d_model, model.d_ff = 12, 768, 3072
    model.num_heads, model.num_kv_heads, model.head_dim = 12, 12, 64
    model.positions, model.max_positions = "learned", 1024
    model.norm, model.activation, model.gated, model.bias = (
        "layer",
        "gelu",
        False,
        "all",
    )
    model.tie_embeddings = True

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 6e-4, 0.1
    optimizer.warmup_steps = 700

    config.checkpoint.every_steps = 1000
    return sized(config, size)
