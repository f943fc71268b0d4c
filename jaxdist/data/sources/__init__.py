"""Data sources: what each value of `data.source` reads. The list is in `table`."""
