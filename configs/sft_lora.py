"""The quickstart's model learns to answer questions about Python: adapters on 200 short chats.

    python -m jaxdist.train --config quickstart
    python -m jaxdist.train --config sft_lora
    python -m jaxdist.generate --workdir runs/sft_lora --chat --prompt "What does len() return?"

The second takes about two minutes on two CPU cores. Another run as base: --config.init.from_run=FOLDER.
For a model of Hugging Face take --config finetune:lora with your chats.
"""

from pathlib import Path

from jaxdist import default_config

HERE = Path(__file__).resolve().parent


def get_config():
    config = default_config()
    config.init.from_run = "runs/quickstart"
    # so small a model takes long steps: alpha / rank is 6, usual is 2
    config.lora.rank, config.lora.alpha, config.lora.dropout = 16, 96.0, 0.05
    config.train.steps = 300
    config.train.eval_every = 100
    config.batch.global_size, config.batch.sequence_length = 8, 256

    config.data.source, config.data.format = "jsonl", "chat"
    config.data.path = str(HERE / "python_questions.jsonl")
    # bytes have no template of their own
    config.data.chat_template = str(HERE / "bytes_chat.jinja")
    config.data.packing = "documents"

    config.optimizer.learning_rate = 9e-4
    return config
