"""Device states from the vendors' own tools: how each is called, and parsers of its output."""
