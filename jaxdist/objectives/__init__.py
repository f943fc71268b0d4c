"""Objectives that a config names: what a model is trained for, beside next tokens."""
