"""When experts' weights and gradients move: one iteration to the next. Begin with runtime.py.

runtime, hooks       the Balancer executes a schedule; hooks tell it that a computation begins
actions, lower       a schedule as data; the order of a stage's computations -> the schedule with Plan, Trans and Agg
layer_state          one MoE layer: its manager, its slots, and the rounds of its Trans and Agg
planner, agreement   a thread that asks the policy for plans; ranks that share a placement use the same plans
"""
