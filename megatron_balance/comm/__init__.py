"""Communication of rows and experts between ranks.

alltoall             the interface AllToAll, and the all-to-alls that ignore nodes: flat and p2p
hierarchical         1dh and 2dh: fewer, larger messages between nodes
dedup                dedup: a row travels once to each node that needs it
pipelined            pipe: messages within and between nodes overlap; SAA: results overlap their all-gather
registry             all-to-alls by name; auto: the all-to-all with the shortest predicted time, for each exchange
sharded              exchanges with sharded experts: rows to every shard, sums over shards back
blocks               reorders blocks of rows: by source, by chunk, by slot
codecs, compressed   compression of rows, and which exchanges of a layer are compressed
trans_agg            Trans and Agg: weights from owners to guests, gradients back
ownership_transfer   Transfer: experts and their optimizer state move to other owners
"""
