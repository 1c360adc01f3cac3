"""When experts' weights and gradients move: one iteration to the next. Begin with runtime.py.

runtime.py       the Balancer: executes a schedule, one computation after another
hooks.py         calls the Balancer at the moments of megatron-core's schedules
actions.py       a schedule as data, and as text that can be read back
lower.py         the order of a stage's computations -> the schedule with Plan, Trans and Agg
validate.py      refuses schedules that would train on wrong weights, lose gradients or hang
layer_state.py   one MoE layer: its manager and slots, and its record of an iteration
planner.py       a thread that asks the policy for plans while training continues
agreement.py     all ranks that have one placement use the same plans; who makes them
"""
