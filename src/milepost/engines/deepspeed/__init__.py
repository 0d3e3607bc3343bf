"""DeepSpeed ZeRO as an engine."""
