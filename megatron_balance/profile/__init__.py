"""Speed of a cluster as data: the constants of cost models. Nothing here measures.

cluster_profile   ClusterProfile: times of communication and computation, as JSON in a file
cluster           a profile derived from a description of the hardware (configs/clusters/*.yaml)
parsing           the content of such files -> typed fields
flops             operations of a layer
kernel_times      seconds of kernels by kind, and how fast a device has them
computation       seconds of a layer outside its routed experts
"""
