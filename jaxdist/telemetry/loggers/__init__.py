"""Loggers of external trackers, and the protocol that they share."""
