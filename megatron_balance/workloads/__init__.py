"""Synthetic and recorded routing, which make imbalance repeatable.

synthetic        the experts that each token chooses, as a function of workload, seed and step
imbalance        the workloads W0 to W7 of Megatron-LM's benchmark of token imbalance
forced_routing   routers that choose by a workload (--moe-router-force-workload)
replay           routers that repeat the choices of an earlier run (--moe-routing-replay-path)
"""
