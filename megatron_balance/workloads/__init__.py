"""Synthetic routing, so that imbalance repeats.

synthetic        the experts that each token chooses, as a function of workload, seed and step
forced_routing   routers that choose by a workload (--moe-router-force-workload)
"""
