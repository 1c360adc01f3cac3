"""Output about a run's loads, balance and times, for people.

balance           LayerReport: measures of balance, for the log line and TensorBoard
layer_report      one layer's finished iteration, and its LayerReport
routing           tokens per expert, and files with every token's experts (--moe-routing-trace-path)
calibration_log   file with the factors of calibrated plans (--balance-calibrate)
load_log          files of load matrices and placements (--balance-log-dir)
trace             files for Perfetto with each stream's activities (--balance-timeline)
scalars           TensorBoard event files
wandb_run         the same numbers in Weights & Biases (--wandb-project)
progress_log      file with the starts and checkpoints of a run's jobs (--log-progress)
profiler          profiles of some iterations (--profile), and spans in them
optional          writing of all these files: a failure is a warning and never stops training
"""
