"""`python -m rollcage`: the command, where its script is not on the path."""

from rollcage.cli import main

main()
