"""`python -m flows.cli`: the `dapo` command of this Python environment."""

from flows.cli import main

main()
