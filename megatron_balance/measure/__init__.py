"""How fast this cluster communicates and computes.

measure      a ClusterProfile from times, and where it is kept
stopwatch    the times: collectives among groups, and passes of experts and codecs
rounds       Trans and Agg in which all links are busy, and the lines of their batches
probes       experts, codecs and exchanges on synthetic tokens, ready to be timed
"""
