"""Who owns and who hosts each expert of one MoE layer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """Where the experts of one MoE layer live, as a frozen value.

    A slot is room for one expert's weights on a rank; a physical expert is a (rank, slot) pair with the index
    `rank * slots_per_rank + slot`.
    """

    num_experts: int
    """E: logical experts, what the router chooses among."""

    num_ranks: int
    """D: expert-parallel ranks."""

    expert_of_physical: tuple[int, ...]
    """The logical expert in each of the P physical slots."""

    @classmethod
    def identity(cls, num_experts: int, num_ranks: int) -> "Placement":
        """Every expert is computed by its owner only: expert e lives on rank e // (E/D)."""
        if num_experts % num_ranks:
            raise ValueError(
                f"--num-experts {num_experts}: must be a multiple of --expert-model-parallel-size {num_ranks}"
            )
        return cls(num_experts, num_ranks, tuple(range(num_experts)))

    @property
    def num_physical(self) -> int:
        """P: physical experts over all ranks."""
        return len(self.expert_of_physical)

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical // self.num_ranks

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """The logical expert in each slot of a rank."""
        return self.expert_of_physical[rank * self.slots_per_rank : (rank + 1) * self.slots_per_rank]

    @property
    def is_identity(self) -> bool:
        """Whether physical and logical experts are the same thing."""
        return self.expert_of_physical == tuple(range(self.num_experts))
