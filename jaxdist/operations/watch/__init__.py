"""Watching a run: hangs, slow steps, stragglers, replicas, preemption notices."""
