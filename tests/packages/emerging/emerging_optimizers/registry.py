"""Optimizers beside Muon, of which the stand-in has none."""


def get_optimizer_name_list() -> list[str]:
    """Return the names of the registered optimizers."""
    return []
