"""One file per stage, the artifact store and child processes."""
