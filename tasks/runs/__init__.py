"""Runs of the chain: the current run, its report, recorded runs, plans, export and garbage
collection.
"""
