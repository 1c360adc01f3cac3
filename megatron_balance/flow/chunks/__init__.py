"""A layer's rows in chunks: experts compute one chunk while another chunk is in flight. Begin with order.py.

order      the seven tasks of a chunk, task orders as data (ScheMoE), and splitting a plan into chunks
choice     predicts the seconds of each task; chooses each layer's number of chunks and task order
pipeline   executes an order: exchanges and experts, forward and backward
"""
