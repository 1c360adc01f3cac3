"""When experts' weights and gradients move: one iteration to the next. Begin with runtime.py, the Balancer.

lower.py makes the schedule (actions.py) that the Balancer executes; hooks.py calls it when a computation begins.
"""
