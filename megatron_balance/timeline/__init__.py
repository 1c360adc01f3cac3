"""When experts' weights and gradients move: one iteration to the next. Begin with runtime.py.

runtime.py       the Balancer: executes a schedule, one computation after another
hooks.py         tells the Balancer that a computation of megatron-core's schedules begins
actions.py       a schedule as data, and as text that can be read back
lower.py         the order of a stage's computations -> the schedule with Plan, Trans and Agg
validate.py      refuses schedules that would train on wrong weights, lose gradients or hang
layer_state.py   one MoE layer: its manager, its slots, and the rounds of its Trans and Agg
planner.py       a thread that asks the policy for plans while training continues
agreement.py     ranks that share a placement use the same plans; which rank makes them
"""
