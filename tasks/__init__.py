"""The chain: chain.py runs the stages, links.py orders them, stages.py declares them."""
