"""From a command line to a checked RunConfig, before a process group exists.

arguments         build the parser, parse a command line, construct the RunConfig
parser            our extensions of argparse: files of flags, reasons for refused flags and values, help with lists
flag_groups       the groups of `--help`, the fields that have flags, and the help of megatron-core's fields (.yaml)
yaml_file         flags from a YAML file (--yaml-cfg)
upstream_flags    Megatron's flags that have no effect or are refused, with the reasons (.yaml)
command_line      CommandLine: the values of all flags, which checks read and complete
checks            flags against each other: what is required, the model's shape, pipeline stages, batch sizes, data
moe_checks        flags of MoE layers, balancing and expert communication
optimizer_checks  flags of Muon
machine_checks    flags against the machine: backend, packages, fused kernels, profilers
"""
