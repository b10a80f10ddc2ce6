"""Runs of the chain: the current run, its report, records, plans, export, collection."""
