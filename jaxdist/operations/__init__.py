"""What keeps and shows a run: supervision, watching, ledger, copies, pages."""
