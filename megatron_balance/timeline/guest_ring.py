"""Guest slots that the layers of a rank share if each microbatch has its own placement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from megatron_balance.comm.trans_agg import Slots, WeightSlots
from megatron_balance.timeline.layer_state import PlacementRounds


@dataclass(eq=False)
class GuestRing:
    """The contents of the shared buffers of guest slots; equal on all ranks of an expert-parallel group."""

    buffer_of: Mapping[WeightSlots, int]
    """The buffer of each layer's guest slots (`lower.each_microbatch`)."""
    _holds: dict[int, PlacementRounds] = field(default_factory=dict, init=False)
    """By buffer: the pass whose weights it holds, or will hold when the Trans that has started is complete."""

    @classmethod
    def of(cls, layers: Sequence[Slots], ring: int) -> "GuestRing":
        """Return the ring of a stage's layers, in which forward passes may have as many buffers of their own."""
        forward = {slots.forward_slots: ring + place % ring for place, slots in enumerate(layers)}
        return cls(forward | {slots: place % ring for place, slots in enumerate(layers)})

    def has(self, slots: WeightSlots, one: PlacementRounds) -> bool:
        """Return whether a layer's guest slots hold the weights of a pass, or the pass has no guests."""
        return not len(one.plan) or self._holds.get(self.buffer_of[slots]) is one

    def take(self, slots: WeightSlots, one: PlacementRounds) -> bool:
        """Let a pass have a layer's guest slots; return whether a Trans must fill them."""
        if len(one.plan):
            needed = not self.has(slots, one)
            self._holds[self.buffer_of[slots]] = one
            return needed
        return True
