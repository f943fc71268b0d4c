"""The trainer: the config of a run, its checks, its start, its loop and its end."""
