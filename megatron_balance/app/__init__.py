"""The programs that a user starts.

launch       pretrain: from a command line to a finished run, on every rank
preflight    checks that each rank makes alone before it joins: flags, nodes, tokenizer, policy, files
watching     output of a run besides its log line: recordings, profiles, memory, progress
facts        facts that all ranks of a job must share, compared before anything is built
dry_run      checks a layout of any size in one process, and whether it fits a described cluster
memory       estimates the memory of activations for a dry run
simulation   turns a configuration into a job whose iterations can be simulated
integrate    balancing inside Megatron-LM or a custom training loop
"""
