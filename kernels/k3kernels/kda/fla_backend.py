"""Kimi Delta Attention through the Triton kernels of fla-core >= 0.6.0.

Written against the source of fla-core 0.6.0 and not run on a GPU yet: run ``tests/kernels/test_kda_fla.py``
on one before trusting it.
"""

import torch.distributed as dist
from torch import Tensor


def fla_kda_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    f: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    *,
    gate: str,
    lower_bound: float,
    scale: float | None,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    context_group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``kda_attention`` with norm, gate and beta's sigmoid inside fla's kernels; same arguments.

    With `context_group`, the tokens are this rank's of one row that lies in contiguous parts on the ranks of the group,
    and `cu_seqlens` bounds the documents of the whole row; fla takes neither initial nor final states there.
    """
    # Imported here because importing fla probes for a GPU and warns on machines without one.
    from fla.ops.kda import chunk_kda

    floored = gate == "floored"
    # fla's fast diagonal tiles hold only for floors in [-5, 0); other gates take its pairwise path.
    safe_gate = floored and -5.0 <= lower_bound < 0
    boundaries: dict[str, object] = {"cu_seqlens": None if cu_seqlens is None else cu_seqlens.long()}
    if context_group is not None:
        from fla.ops.cp import build_cp_context

        boundaries = {"cp_context": build_cp_context(cu_seqlens.long(), context_group)}
    o, final_state = chunk_kda(
        q=q,
        k=k,
        v=v,
        g=f,
        beta=b,
        A_log=A_log.float(),
        dt_bias=dt_bias.float().flatten(),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=safe_gate,
        lower_bound=lower_bound if floored else None,
        state_v_first=False,
        **boundaries,
    )
    return o.to(v.dtype), final_state
