"""The programs that a user starts.

launch       pretrain: from a command line to a finished run, on every rank
preflight    what a rank learns and checks alone, before it joins: flags, nodes, tokenizer, policy, files
watching     what a run shows besides its log line: recordings, profiles, memory, progress
facts        what all ranks of a job must share, compared before anything is built
dry_run      a layout of any size, checked in one process, and whether it fits a described cluster
memory       the activations that a dry run estimates
simulation   a job whose iterations are simulated, from a configuration
integrate    balancing inside Megatron-LM or a custom training loop
"""
