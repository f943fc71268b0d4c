"""Files of a run: atomic writes, locks, digests, the format, untrusted JSON."""
