"""A program that trains with the core alone: no wing of jaxdist, no callback of one.

Takes the workdir; prints the folders of jaxdist that it has loaded.
"""

import sys
import time
from pathlib import Path

from jaxdist.trainer import run_config, training
from jaxdist.trainer.callbacks import every

SIZES = {
    "num_layers": 2,
    "d_model": 32,
    "d_ff": 64,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
}

config = run_config.default_config()
config.model.update(SIZES)
config.train.steps = 40
config.train.log_every = 1
config.train.eval_every = 0
config.batch.global_size = 8
config.batch.sequence_length = 32
config.checkpoint.every_steps = 5
slowly = every(1, lambda view: time.sleep(0.02))  # so that a test can end it half way
training.run(run_config.from_config(config), Path(sys.argv[1]), callbacks=[slowly])
folders = {name.split(".")[1] for name in sys.modules if name.startswith("jaxdist.")}
print("loaded:", *sorted(folders))
