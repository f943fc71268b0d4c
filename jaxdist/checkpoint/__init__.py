"""Checkpoints of a run: saves, restores, integrity, and their command."""
