"""Weights from policy ranks to the engines' processes: two buckets at a time, with a checksum for each tensor."""
