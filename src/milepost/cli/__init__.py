"""The command line: thin calls of the rooms below, one module a group of commands.

app         the application, its options' spelling, and the one place where errors become an exit status
merging     merge
comparing   test, and logits for its --logits
inspecting  inspect, verify
options     what these share
running     train, config, status, report: commands on runs
"""

from milepost.cli.app import main

__all__ = ["main"]
