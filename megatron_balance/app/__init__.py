"""The programs that a user starts.

launch       pretrain: from a command line to a finished run, on every rank
watching     what a run shows besides its log line: profiles, memory, progress
preflight    what a rank checks alone, before it joins: data, files and directories that flags name
facts        what all ranks of a job must share, compared before anything is built
dry_run      a layout of any size, checked in one process
capacity     whether a layout fits a described cluster
memory       the activations that a dry run estimates
simulation   a job whose iterations are simulated, from a configuration
integrate    balancing inside Megatron-LM or a custom training loop
"""
