"""From a command line to a checked RunConfig, before a process group exists.

arguments         build the parser, parse a command line, construct the RunConfig
parser            our extensions of argparse: files of flags, reasons for refused flags and values
yaml_file         flags from a YAML file (--yaml-cfg)
checks            flags against each other: what is required, the model's shape, batch sizes, data
attention_checks  flags of norms across heads and of latent attention
moe_checks        flags of MoE layers, balancing and expert communication
watch_checks      flags of profilers, memory and Weights & Biases
data_args         blends of data sets that are named in a file
pipeline_checks   how pipeline stages share the layers
machine_checks    flags against the machine: backend, packages, fused kernels
upstream_flags    Megatron's flags that have no effect or are refused, with the reasons
layer_frequency   the expressions of --moe-layer-freq
"""
