"""A configuration becomes a run: model, optimizer, data and balancer.

run         build_run: everything that a rank trains with; its model, layer specs and hooks
wiring      Wiring: the values that layers, hooks and balancer share, built once and handed on
profiles    Profiles: how fast the cluster is, read from a file or measured when first needed
balancer    build_balancer: guest slots, policy, cost model and schedule of the built model
"""
