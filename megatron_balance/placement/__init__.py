"""Placements of experts as values, and what follows from them. Arrays in, values out.

placement   Placement, a frozen value: which ranks own and which ranks host the experts of one layer
tables      arrays that a placement alone determines
splits      how the hosts of an expert share its tokens
links       how busy the routes of all experts keep links and adapters
relays      routes in which guests pass pieces on to other guests
transfers   which rank sends which piece of which expert to which rank, and in which order
"""
