"""The record of a run: whole steps on disk, what is in them, and going on from them.

manager                 what a training loop calls: resume, save, close
commit, files           writing one step so that it is whole or absent
manifest, steps         what a step holds, and which steps are whole
resume, restore, live   where training begins, and filling engines from a step
retention               which steps may go
events, history, facts  the diary of the run, and what it tells
status, verify, locate  questions about a run, a checkpoint, a path
comm                    how ranks agree
"""
