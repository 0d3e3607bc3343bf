"""Megatron-Core as an engine: models, schedules, optimizers, and what each rank holds."""
