"""Trained runs, opened to generate text and to score held-out data and tasks."""
