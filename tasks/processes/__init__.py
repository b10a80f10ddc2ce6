"""Child processes: supervised, optionally detached, under time limits; and the driver of a
training.
"""
