"""Names of a router's fused functions, which megatron-core imports; none is implemented."""


def fused_topk_with_score_function(*args: object, **kwargs: object) -> None:
    raise NotImplementedError("--moe-router-fusion")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss = fused_topk_with_score_function
