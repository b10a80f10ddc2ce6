"""The artifact store: which stages are done, and their outputs."""
