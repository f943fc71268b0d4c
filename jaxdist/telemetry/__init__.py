"""Metrics files, clock, loggers, FLOPs, HLO, profiles, terminal display."""
