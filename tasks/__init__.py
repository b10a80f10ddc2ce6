"""The stages of the chain, the artifact store, runs, child processes and serving."""
