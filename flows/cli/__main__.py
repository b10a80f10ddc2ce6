"""`python -m flows.cli`: the command line of this interpreter's environment."""

from flows.cli import main

main()
