"""How fast this cluster communicates and computes.

measure      times a cluster and fits a ClusterProfile, and where it is kept
operations   the timed operations, on synthetic tensors
stopwatch    how operations are timed that all ranks of a group run together
"""
