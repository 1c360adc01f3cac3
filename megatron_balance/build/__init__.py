"""Builds a run from a configuration: model, optimizer, data and balancer.

run         build_run: everything that a rank trains with; the model, its layer specs and hooks
wiring      Wiring: the values that layers, hooks and balancer share, built once and handed on
optimizer   build_optimizer: Adam, SGD, or Muon for matrices with Adam for the rest
routing     choices of experts by a workload or by the trace of an earlier run
profiles    Profiles: the speed of the cluster, read from a file or measured when first needed
balancer    build_balancer: guest slots, policy, cost model and schedule of the built model
"""
