"""Interfaces of models and objectives, and the names of parameter dims."""
