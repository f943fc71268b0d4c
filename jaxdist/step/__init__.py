"""The train step: gradients, their reduction, the update, and the state."""
