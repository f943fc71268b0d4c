"""A vision transformer of 0.14 M parameters learns scikit-learn's handwritten digits (extra vision).

    python -m jaxdist.train --config vit_digits
    python -m jaxdist.plan --config vit_digits --on cpu:1    # 0.02 GiB

About a minute on two CPU cores.
"""

from jaxdist import default_config


def get_config():
    config = default_config("jaxdist.models.vision:VisionTransformer")
    config.data.source = "digits"
    config.data.validation_share = 52  # a fifth of the scans
    config.batch.global_size = 64
    config.train.steps = 1000
    config.train.eval_every = 250
    config.train.log_every = 50
    config.checkpoint.every_steps = 500
    config.model.label_smoothing = 0.1
    config.model.dropout = 0.1

    optimizer = config.optimizer
    optimizer.learning_rate = 2e-3
    optimizer.b2, optimizer.weight_decay = 0.99, 0.05
    return config
