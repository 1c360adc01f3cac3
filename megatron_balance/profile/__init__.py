"""How fast a cluster is: the constants of cost models, as data. Nothing here measures.

cluster_profile   ClusterProfile: times of communication and computation, saved as JSON
profile_file      read a ClusterProfile from its JSON file, and check every number
cluster           a profile derived from a description of the hardware (configs/clusters/*.yaml)
flops             operations and time of a layer's non-expert part
"""
