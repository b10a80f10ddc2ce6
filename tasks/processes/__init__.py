"""Child processes that never outlive this one, and their supervisor."""
