"""Loads, balance and traces of a run, for people to look at.

balance           LayerReport: measures of balance, for the log line and TensorBoard
layer_report      one layer's finished iteration, and its LayerReport
load              tokens per expert, counted at the routers
calibration_log   file of the factors that plans contain (--balance-calibrate)
load_log          files of load matrices and placements (--balance-log-dir)
routing_trace     files of every token's experts (--moe-routing-trace-path)
trace             files for Perfetto with the activities of each stream (--balance-timeline)
scalars           TensorBoard event files
wandb_run         the same numbers in Weights & Biases (--wandb-project)
progress_log      file of what the jobs of a run have done (--log-progress)
profiler          profiles of some iterations (--profile)
profiling         spans for torch's profiler
optional          writing of all these files: a failure is a warning and never stops training
"""
