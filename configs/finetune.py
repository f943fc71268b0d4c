"""Trains a model that exists on your own data: a Hugging Face folder, or a run.

    python -m jaxdist.train --config finetune --workdir runs/tuned \\
        --config.init.from_huggingface=models/smollm \\
        --config.data.source=text --config.data.path='notes/**/*.md'

`--config finetune:lora` trains adapters of rank 16 instead of all weights. For chats set
data.source=jsonl and data.format=chat. Without a model, or without data, the run is
refused with the flag to add.
"""

from jaxdist import ConfigError, default_config


def get_config(method=None):
    config = default_config()
    config.init.required = True
    config.train.epochs = 1.0  # of the user's data
    config.batch.global_size, config.batch.sequence_length = 16, 512
    config.precision.compute = "bfloat16"
    config.data.packing = "documents"  # no row mixes texts, or examples of chats

    optimizer = config.optimizer
    optimizer.name, optimizer.learning_rate = "adamw", 2e-5
    optimizer.schedule = "cosine"
    optimizer.warmup_steps = None  # a tenth of the steps, at most 100
    if method == "lora":
        config.lora.rank, config.lora.alpha = 16, 32.0
        optimizer.learning_rate = 1e-4
    elif method is not None:
        raise ConfigError(
            f"finetune:{method}: no such method; use finetune or finetune:lora"
        )
    return config
