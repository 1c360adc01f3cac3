"""A layer's rows in chunks: one chunk travels while another one is computed. Begin with order.py.

order.py      the seven tasks of a chunk, orders of them as data, and schedulers (ScheMoE)
times.py      predicts how long each task takes, from a cluster profile
choice.py     chooses the number of chunks and their order, for each layer
chunking.py   splits a dispatch plan into chunks
sorting.py    the orders of rows between exchanges and experts
pipeline.py   executes an order: exchanges and experts, forward and backward
"""
