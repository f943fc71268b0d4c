"""Config groups of the wings and of telemetry: plain data, importable without jax."""
