"""A layer's rows in chunks: one chunk travels while another one is computed. Begin with order.py.

order      the seven tasks of a chunk, orders of them as data (ScheMoE), and how a plan is split into chunks
choice     predicts how long each task takes; chooses the number of chunks and their order, for each layer
pipeline   executes an order: exchanges and experts, forward and backward
"""
