"""The verbs of the command line, for Python: open, merge, test.

ckpt = milepost.open("checkpoints/my/run")            # a run, a step, a role or a model directory
ckpt.index["model.embed_tokens.weight"].read()        # a torch tensor
milepost.merge("checkpoints/my/run", "my-model", dtype="bf16", lora="merge")
milepost.test("checkpoints/my/run", "my-model").ok

A module a verb: `opening`, `merging`, `comparing`. `MergeCall` and `TestCall` say what a call may set; the command line
makes its options of the same fields. A merge starts without what `test` needs.
"""
