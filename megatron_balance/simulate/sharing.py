"""How fast collectives are that need the same resources at the same time: max-min fair progress.

A collective that runs alone progresses at speed 1, at which it uses a share of each of its resources; the share of its
busiest one is 1. Together, all collectives progress equally fast until a resource is used up. Those that need it keep
their speed, and the others go on, up to speed 1. So no collective can be faster without a slower one becoming slower.

In the shapes, F counts collectives in progress and R resources.
"""

import numpy as np

FULL = 1e-12
"""Share of a resource that rounding may leave unused."""


def speeds(use_FR: np.ndarray) -> np.ndarray:
    """Return [F] the speed of each collective, at most 1.

    Args:
        use_FR: share of each resource that a collective uses at speed 1; the sum over collectives may exceed 1.
    """
    speed_F = np.zeros(len(use_FR))
    grows_F = np.ones(len(use_FR), dtype=bool)
    left_R = np.ones(use_FR.shape[1])
    while grows_F.any():
        wanted_R = use_FR[grows_F].sum(0)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = np.where(wanted_R > 0, left_R / wanted_R, np.inf).min(initial=np.inf)
        step = min(step, 1.0 - speed_F[grows_F].max())
        speed_F[grows_F] += step
        left_R = np.maximum(left_R - step * wanted_R, 0.0)
        used_up_R = left_R <= FULL
        grows_F &= (speed_F < 1.0 - FULL) & ~(use_FR[:, used_up_R] > 0).any(1)
    return speed_F
