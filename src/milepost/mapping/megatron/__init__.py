"""Megatron's names and shapes and Hugging Face's, in both directions, as data.

rules       the words: which tensors of Hugging Face one of Megatron holds, and how; how tensor parallelism cuts it
families    the tables
spelling    the several names of one tensor
stacks      all layers or experts as one tensor
parts       pieces of tensor-parallel ranks
names       all of it, applied to an index
dist        where each tensor lies in a dist checkpoint that is written
"""

from milepost.mapping.megatron.families import RULES
from milepost.mapping.megatron.names import from_megatron, model_of, remarks, to_megatron

__all__ = ["RULES", "from_megatron", "model_of", "remarks", "to_megatron"]
