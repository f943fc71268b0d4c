"""Number formats of activations and matmuls."""
