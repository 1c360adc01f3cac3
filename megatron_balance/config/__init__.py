"""Every setting of a run, as frozen dataclasses whose fields are the flags.

run_config        RunConfig, with the settings of balancing, communication, the model and the processes
training_config   settings of data, tokenizer, training, checkpoints, schedules, logs and profilers
flags             dataclass fields -> command-line flags
"""
