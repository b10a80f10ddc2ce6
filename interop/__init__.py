"""What the configurations and logs of other trainers mean here: pure data and functions.

Words: *theirs* is a key or value of the other trainer, *ours* one of this project's configuration.
"""
