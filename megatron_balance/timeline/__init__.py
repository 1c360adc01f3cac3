"""Movement of experts' weights and gradients, from one iteration to the next. Begin with runtime.py.

runtime, hooks       the Balancer executes a schedule; hooks announce the beginning of computations
actions, lower       schedules as data; adding Plan, Trans and Agg to a stage's computations
layer_state          one MoE layer: its manager, its slots, and the rounds of its Trans and Agg
guest_ring           guest slots that layers share if each microbatch has its own placement
planner, agreement   a thread that asks the policy for plans; agreement among ranks that share a placement
"""
