"""Folders of torch.distributed.checkpoint, and those that Megatron makes of them: reading and writing."""
