"""Predicts the seconds of a layer, an exchange or a Trans on a cluster, from arrays.

    layer        seconds of a layer from sums over its microbatches
    core         compiled loops over loads and their costs, for the models below and for searches
    candidates   costs of changing experts' hosts, and loads of guests
    network      batches of messages on links within nodes, and on adapters that the ranks of a node share
    exchange     seconds of the all-to-alls
    flex         seconds of exchanges that send a token once to each node and rank: the flex dispatcher, dedup
    sending      seconds of Trans and Agg, with the best routes and pieces
    messages     the same seconds for many plans, in compiled loops
    loads        tokens that ranks compute, send and receive under a placement
    model        CostModel: seconds of a layer under a placement, after Pro-Prophet
    bound        a lower bound of the layer's seconds under all placements
    calibration  measured over predicted seconds of a run, by component

Start with `model`.
"""
