"""Megatron's checkpoints: classic files of ranks, and what a dist checkpoint has beside torch's own."""
