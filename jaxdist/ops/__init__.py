"""Ops: attention, matmuls, experts, the loss, and their costs."""
