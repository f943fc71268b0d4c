"""Data sources: a reader for each value of `data.source`; `table` lists them."""
