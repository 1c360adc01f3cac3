"""How long a layer, an exchange or a Trans takes on a cluster. Arrays in, seconds out.

    network      links within nodes, adapters that the ranks of a node share, and batches of messages on them
    exchange     seconds of the all-to-alls
    batches      seconds of the batches of messages of Trans and Agg
    sending      seconds of Trans and Agg, and their best routes and pieces
    few_batches  an estimate of Trans and Agg for searches
    loads        what ranks compute, send and receive under a placement
    guests       what the guests of several plans change
    loops        loads, and seconds of a layer, for many candidates in machine code
    model        CostModel: seconds of a layer under a placement, after Pro-Prophet
    calibration  how much longer a run measures than the model predicts, by component

Start with `model`.
"""
