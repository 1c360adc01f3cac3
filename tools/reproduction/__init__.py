"""The papers' tables and figures, simulated; `tools/reproduce.py` prints them.

    simulated      a job of a paper, with the flags of a system -> its seconds
    tables         what a table is, and how far its numbers are from the paper's
    pro_prophet, flexmoe, demi, schemoe, parm
                   the tables of each paper: data, and a function that simulates it

Loads have the shares that the papers' own figures have. Rates are those of data sheets; nothing is fitted to a paper's
results.
"""
