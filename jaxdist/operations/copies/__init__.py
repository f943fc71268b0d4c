"""Copies of checkpoints in a store."""
