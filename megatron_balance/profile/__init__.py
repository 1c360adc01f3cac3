"""How fast a cluster is: the constants of cost models, as data. Nothing here measures.

cluster_profile   ClusterProfile: times of communication and computation, as JSON in a file
cluster           a profile derived from a description of the hardware (configs/clusters/*.yaml)
flops             operations and time of a layer's non-expert part
"""
