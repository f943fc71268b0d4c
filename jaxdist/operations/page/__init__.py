"""Pages and tables that show runs; they need no jax."""
