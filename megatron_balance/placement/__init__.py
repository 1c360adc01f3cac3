"""Which ranks host which experts: placements, their cost, and the policies that choose them. Arrays in, values out.

    placement        Placement, a frozen value: which ranks own and which ranks host the experts of one layer
    splits           how the hosts of an expert share its tokens
    transfers        which rank sends which piece of which expert to which rank, round by round
    cost_model       seconds of a layer under a placement, after Pro-Prophet and FlexMoE
    predictor        the next iteration's load, from past iterations
    manager          the placement of one layer over time: asks the policy, validates and adopts its answer
    ownership        which guests become owners (Transfer)
    vexperts         FlexMoE's vExperts: modifications, and their cost
    policies/        one file per policy
    demi/            DEMI's scheduling problem: linear program, search, list scheduling
    policy_process   a user's policy in its own process, as the rank sees it
    policy_server    the program of that process

Read placement, cost_model and policies/interface first.
"""
