"""How long a layer, an exchange or a Trans takes on a cluster. Arrays in, seconds out.

    core         loads and their costs in machine code, for the models below and for searches
    candidates   what experts with other hosts change, and the guests of whole plans
    network      links within nodes, adapters that the ranks of a node share, and batches of messages on them
    exchange     seconds of the all-to-alls
    sending      seconds of Trans and Agg, and their best routes and pieces
    loads        what ranks compute, send and receive under a placement
    model        CostModel: seconds of a layer under a placement, after Pro-Prophet
    calibration  how much longer a run measures than the model predicts, by component

Start with `model`.
"""
