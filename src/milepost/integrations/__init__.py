"""Drop-ins for trainers and engines of others.

policy         `milepost.save_policy`: one model out of a wrapped, sharded one, as a Hugging Face directory
trl            `PolicySaveMixin` for TRL's PPOTrainer
transformers   `CheckpointCallback` for any Hugging Face Trainer

live           a live model as an index: the same picture as of files, so that the same mapping serves both
methods        three ways for its weights into the files: stream, gather, direct
adapter        where PEFT has put an adapter around it
gather         whole tensors out of sharded ones, a few at a time
folder         new files of a model into a directory that holds others

Each module imports the framework that it plugs into where it needs it.
"""
