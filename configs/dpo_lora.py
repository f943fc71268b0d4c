"""The model of sft_lora learns which of two answers is better: adapters on 200 pairs.

    python -m jaxdist.train --config quickstart
    python -m jaxdist.train --config sft_lora
    python -m jaxdist.train --config dpo_lora
    python -m jaxdist.generate --workdir runs/dpo_lora --chat --prompt "What does len() return?"

The third takes a minute on two CPU cores. The chosen answer of a pair offers an example,
the rejected one does not. The reference is the model of sft_lora. For a model of Hugging
Face set init.from_huggingface, and data.path to your pairs.
"""

from pathlib import Path

from jaxdist import default_config

HERE = Path(__file__).resolve().parent


def get_config():
    config = default_config()
    config.init.from_run = "runs/sft_lora"
    # the adapters of sft_lora learn on
    config.lora.rank, config.lora.alpha = 16, 96.0
    config.train.steps = 100
    config.train.eval_every = 25
    config.batch.global_size, config.batch.sequence_length = 8, 512

    config.objective.name = "dpo"
    # so small a model would lose the words that it has learned
    config.objective.sft_weight = 2.0
    config.data.source, config.data.format = "jsonl", "preferences"
    config.data.path = str(HERE / "python_preferences.jsonl")
    # bytes have no template of their own
    config.data.chat_template = str(HERE / "bytes_chat.jinja")
    config.data.packing = "documents"

    config.optimizer.learning_rate = 3e-4
    return config
