"""The families that work through a sequence in chunks, small, with random weights: for the table of lengths alone.

Their chunks are as long as the published models'. `moetrt.models` has the families of docs/families.md.
"""

import torch
from transformers import (
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    PreTrainedModel,
)

from moetrt.models import SMALL, randomized

LONG = SMALL | {"max_position_embeddings": 1024}


def deepseek_v4_compressed() -> PreTrainedModel:
    """Attention to windows of 4 tokens, 16 of them chosen, and of 128 tokens; 2 MoE layers of 8 experts, 3 chosen."""
    config = DeepseekV4Config(
        vocab_size=96,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1024,
        layer_types=["compressed_sparse_attention", "heavily_compressed_attention"],
        index_n_heads=16,
        index_head_dim=16,
        index_topk=16,
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=8,
        mlp_layer_types=["moe", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        hc_mult=2,
        hc_sinkhorn_iters=3,
    )
    model = randomized(DeepseekV4ForCausalLM, config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("position_bias"):  # a fresh model's is what lay in memory
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight))
    return model


def nemotron_h() -> PreTrainedModel:
    """Nemotron-3: Mamba-2 in chunks of 128, attention, and 2 MoE layers of 8 experts, 2 chosen."""
    config = NemotronHConfig(
        vocab_size=96,
        hidden_size=64,
        layer_types=["linear_attention", "moe", "full_attention", "moe"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        ssm_state_size=8,
        mamba_num_heads=4,
        mamba_head_dim=32,
        n_groups=2,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        intermediate_size=48,
    )
    return randomized(NemotronHForCausalLM, config)


def granite_moe_hybrid() -> PreTrainedModel:
    """Granite 4: Mamba-2 in chunks of 256 and attention; 2 MoE layers of 8 experts, 2 chosen, and a shared one."""
    config = GraniteMoeHybridConfig(
        **LONG,
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        layer_types=["linear_attention", "full_attention"],
        mamba_n_heads=4,
        mamba_d_state=8,
        mamba_n_groups=2,
        residual_multiplier=0.22,
    )
    return randomized(GraniteMoeHybridForCausalLM, config)


def minimax() -> PreTrainedModel:
    """MiniMax-01: lightning attention in blocks of 256, and softmax attention; 2 MoE layers of 8 experts, 2 chosen."""
    config = MiniMaxConfig(
        **LONG,
        num_local_experts=8,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"],
        linear_attn_alpha_factor=1.5,
    )
    return randomized(MiniMaxForCausalLM, config)


def kimi_linear() -> PreTrainedModel:
    """Kimi delta attention in chunks of 64, and latent attention; 2 MoE layers of 8 experts, 2 chosen."""
    config = KimiLinearConfig(
        **LONG | {"num_hidden_layers": 3, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        qk_nope_head_dim=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        mlp_layer_types=["dense", "sparse", "sparse"],
        linear_head_dim=16,
        linear_num_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return randomized(KimiLinearForCausalLM, config)
