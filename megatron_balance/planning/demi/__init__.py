"""DEMI's scheduling problem: which worker computes each expert, and in which time slots (DEMI, Section III).

    problem       Problem: sizes, capacities and room of one MoE layer
    schedule      MiniTaskSchedule as data and as text
    program       the linear program (7), which relaxes each expert's worker to shares
    listing       list scheduling of given placements (Algorithm 1, lines 3 to 42)
    neighborhood  moves and exchanges of experts, and the busy times of links and workers afterwards
    search        placements with short schedules, from the shares (lines 1 and 2) and by local search

`policies/demi.py` makes a Problem from a load and the cost model.

A run executes the hosts of a schedule and, with `--moe-comm-order demi`, the chunks of tokens that slots compute. It
does not execute the slots of TRANS: weights travel in the rounds of `placement/trans_plan.py`. Their order does not
affect the schedule, because a layer's experts compute only after all weights have arrived.
"""
