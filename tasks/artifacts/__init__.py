"""The artifact store: finished stages and their outputs."""
