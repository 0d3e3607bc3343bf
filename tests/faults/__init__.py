"""Faults for real processes: killed, cut off from power, refused by the disk; and what must hold after each.

shim      every call that changes files, counted; any of them made to fail (shim.c, preloaded)
savers    jobs of ranks that save with the real manager, forked from a warm process
state     what must hold on disk afterwards
sweeps    one fault at every call, one after another
crash     what a disk may hold after a power cut, from a recorded save
mutants   savers with one safeguard taken out: the proofs must fail on each
places    file systems of one's own: ext4 in a file, that is cut off, frozen, or read-only

The tests here inject a part of these; `benchmarks/faults.py` injects all, and as many random ones as it is told to.
"""
