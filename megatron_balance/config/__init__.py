"""Every setting of a run, as frozen dataclasses whose fields are the flags.

run_config        RunConfig, with the settings of balancing, communication, the model and the processes
training_config   settings of data, tokenizer, training, checkpoints and schedules
log_config        settings of logs, TensorBoard, Weights & Biases and profilers
flags             dataclass fields -> command-line flags
"""
