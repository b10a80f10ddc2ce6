"""Weights from policy ranks to the processes of engines: two buckets at a time, with a checksum for each tensor."""
