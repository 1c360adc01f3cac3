"""How rows and experts travel between ranks: all-to-alls, Trans, Agg and Transfer."""
