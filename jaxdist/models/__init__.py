"""Models: the transformer, the vision transformer, LoRA, and `model.target`."""
