"""The command line: thin calls of the rooms below, one module a group of commands.

app         how a command is called, and the one place where errors become an exit status
commands    which there are
declared    what a command takes, said once; quick and full read a call by it
options     what the commands share
merging     merge
comparing   test
converting  convert
inspecting  inspect, verify
diffing     diff
pruning     prune
running     train, config, status, report: commands on runs
at_url      checkpoints and runs at a URL
"""

from milepost.cli.app import main

__all__ = ["main"]
