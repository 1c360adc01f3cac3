"""Speed of a cluster as data: the constants of cost models. Nothing here measures.

cluster_profile   ClusterProfile: times of communication and computation, as JSON in a file
cluster           a profile derived from a description of the hardware (configs/clusters/*.yaml)
parsing           the content of such files -> typed fields
flops             operations and time of a layer's non-expert part
"""
