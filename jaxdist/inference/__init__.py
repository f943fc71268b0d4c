"""Text from a trained model: generation, scoring, and the weights that they read."""
