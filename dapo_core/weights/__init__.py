"""Transfers weights from policy ranks to engine processes in buckets, verified by checksums."""
