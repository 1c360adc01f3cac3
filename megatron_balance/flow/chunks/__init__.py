"""A layer's rows in chunks: one chunk travels while another one is computed. Begin with order.py."""
