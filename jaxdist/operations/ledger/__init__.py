"""Ledger of a run: its wall time, and its lives."""
