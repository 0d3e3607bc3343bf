import pytest


def test_x(fsdp_checkpoints):
    import subprocess

    print(subprocess.run(["ls", "-R", str(fsdp_checkpoints)], capture_output=True, text=True).stdout)
