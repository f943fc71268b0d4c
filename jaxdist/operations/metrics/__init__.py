"""Prometheus metrics of a run."""
