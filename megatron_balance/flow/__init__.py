"""One MoE layer in one iteration: the path of its tokens. Begin with layer.py.

layer.py               the steps of a mixture of experts, in order
plan.py                the dispatch plan: how many tokens each source sends to each physical expert
cut.py                 one rank's part of a dispatch plan: splits, and the order in which rows are sent
device_plan.py         one source's part of a dispatch plan, on the device
dispatcher.py          dispatch, experts and combine: over our all-to-alls, or over megatron-core's dispatchers
dedup_dispatcher.py    the same with one copy of a token per node
copies.py              copies of tokens: their order, and how they become rows on their way
device_dispatcher.py   the same over HybridEP, without host synchronization
rows.py                a row for every expert that a token chose, and the sums of each token's rows
reroute.py             maps chosen logical experts to physical experts, for megatron-core's dispatchers
chunks/                dispatch and combine in chunks: exchange and computation overlap

experts.py             the experts of one rank: two projections with an activation between them
slot_weights.py        weights of one linear layer, in home slots and in guest slots, and their gradients
slot_linear.py         one linear layer in all slots, as autograd sees it
grouped_gemm.py        matrix products for the rows of all slots, by torch or by Transformer Engine

parallel_schedule.py   the orders of steps with tensor parallelism and sharded experts: megatron, baseline, s1, s2
schedule_choice.py     predicts which schedule takes the least time
routers.py             megatron-core's routers: auxiliary losses, precision of counts, group scores
"""
