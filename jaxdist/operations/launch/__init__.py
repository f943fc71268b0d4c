"""Supervision of processes, preflight measurements, growth."""
