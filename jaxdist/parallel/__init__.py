"""Mesh, sharding rules, precision, remat, and the pipeline executor."""
