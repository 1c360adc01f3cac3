"""Measures how fast this cluster communicates and computes.

measure      measures a cluster, fits a ClusterProfile, and stores it
operations   the timed operations, on synthetic tensors
stopwatch    times operations that all ranks of a group run together
"""
