"""Arguments of `balancers.build` with which each microbatch has its own placement."""

EXACT = {
    "exact": {"overlap": "blockwise", "ring": 2, "ahead": False},
    "exact, one buffer": {"overlap": "blockwise", "ring": 1, "ahead": False},
    "exact, paired": {"overlap": "blockwise", "ring": 2, "ahead": False, "paired": True},
    "exact, blocking": {"overlap": "none", "ring": 3, "ahead": False},
}
TWO_SCALES = {
    "two scales": {"overlap": "blockwise", "ring": 2},
    "two scales, blocking": {"overlap": "none", "ring": 1},
}
