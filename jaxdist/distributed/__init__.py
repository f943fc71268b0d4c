"""Processes of a run: cluster, process group, devices, agreement, network."""
