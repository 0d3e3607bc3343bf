"""DeepSpeed's files: ZeRO stages 0 to 3."""
