"""Parts that keep and show a run: supervision, watching, ledger, copies, pages."""
