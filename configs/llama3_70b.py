"""Llama 3 70B (arXiv:2407.21783), pretraining at 8,192 tokens: 70.55 B parameters.

    python -m jaxdist.train --config llama3_70b --config.data.path='tokens/*.bin'
    python -m jaxdist.train --config llama3_70b:tiny    # the same family in a CPU minute
    python -m jaxdist.train --config llama3_70b:pipeline --config.data.path='tokens/*.bin'
    python -m jaxdist.plan --config llama3_70b --on h100:16x8    # 62.1 GiB, MFU 48 %
    python -m jaxdist.plan --config llama3_70b:pipeline --on h100:16x8    # 25.9 GiB, MFU 42 %
    python -m jaxdist.plan --config llama3_70b:qlora --on a100:1x1 --config.init.required=false    # 61.0 GiB, MFU 45 %

`:pipeline` holds 20 layers on each of four stages, in five chunks of four, for devices that are too
many or too far apart for fsdp alone: 4 x fsdp 32, with --config.mesh.tensor=8 on 1,024 of them.
`:qlora` trains adapters on a base in 4 bits, on one GPU of 80 GB. `train` refuses it without weights and
data: --config.init.from_huggingface=FOLDER --config.data.source=text --config.data.path='notes/**/*.md'.
The .bin files hold token ids as uint32 (128,256 tokens do not fit in uint16).
"""

from jaxdist import default_config, sized


def get_config(size=None):
    config = default_config()
    config.train.steps = 100_000  # 419 B tokens
    config.batch.global_size = 512
    config.batch.sequence_length = 8192
    # 12 bytes a parameter, shared by all devices
    config.mesh.data, config.mesh.fsdp = 1, -1
    config.precision.compute = "bfloat16"
    config.remat.policy = "full"
    config.data.source, config.data.bin_dtype = "bin", "uint32"

    model = config.model
    model.vocab_size = 128_256
    model.num_layers, model.d_model, model.d_ff = 80, 8192, 28_672
    model.num_heads, model.num_kv_heads, model.head_dim = 64, 8, 128
    # As pretrained. Llama 3.1's stretch to 131,072 tokens is rope_factor=8 beside the
    # defaults.
    model.rope_theta, model.rope_factor = 500_000.0, 1.0

    optimizer = config.optimizer
    optimizer.learning_rate, optimizer.final_learning_rate = 1.5e-4, 0.1
    optimizer.warmup_steps = 2000

    config.checkpoint.every_steps = 1000
    if size == "pipeline":
        config.mesh.pipeline = 4
        config.pipeline.schedule, config.pipeline.chunks = "interleaved", 5
        config.pipeline.microbatches = 16  # bubble 3 / 83
        return config
    if size == "qlora":
        return with_adapters(config)
    return sized(config, size)


def with_adapters(config):
    config.init.required = True
    config.lora.rank, config.lora.alpha = 16, 32.0
    config.lora.base = "nf4"
    config.train.steps = 1000
    config.batch.global_size = 16
    config.batch.accumulation = 16  # one sequence at a time
    # of text, not of token files: the tokenizer is that of the weights
    config.data.source, config.data.bin_dtype = "stdlib", "uint16"
    config.data.packing = "documents"

    optimizer = config.optimizer
    optimizer.name, optimizer.learning_rate = "adamw", 1e-4
    optimizer.final_learning_rate = 0.0
    optimizer.warmup_steps = None  # a tenth of the steps, at most 100

    config.checkpoint.every_steps = 100
    return config
