"""The stages of the chain: chain.py runs them, links.py orders them, stages.py declares what they
depend on.
"""
