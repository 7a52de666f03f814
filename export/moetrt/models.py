"""Each family in Transformers' own classes, small, with random weights; as a source: ``moetrt.models:NAME``."""

from typing import Any

import torch
from transformers import (
    AfmoeConfig,
    AfmoeForCausalLM,
    DbrxConfig,
    DbrxForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DeepseekV4Config,
    DeepseekV4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    GraniteMoeSharedConfig,
    GraniteMoeSharedForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from moetrt.contract_model import ContractConfig, contract_decoder_source
from moetrt.source import Source

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""What the configs have in common; routing, gates, scales and norms are each family's own."""

_LINEAR_ATTENTION = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}


def deepseek_v3() -> PreTrainedModel:
    """The demonstration's model, 1 dense and 3 MoE layers: shared expert, grouped sigmoid routing, scaling 2.5."""
    config = DeepseekV3Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=384,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        n_shared_experts=1,
        num_experts_per_tok=4,
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        q_lora_rank=64,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        max_position_embeddings=4096,
    )
    return randomized(DeepseekV3ForCausalLM, config)


def glm4_moe() -> PreTrainedModel:
    """GLM-4.5-MoE, 1 dense and 2 MoE layers: shared expert, sigmoid routing with a correction bias, scaling 2.5."""
    config = Glm4MoeConfig(
        **SMALL | {"num_hidden_layers": 3},
        head_dim=16,
        use_qk_norm=True,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        first_k_dense_replace=1,
    )
    return randomized(Glm4MoeForCausalLM, config)


def gpt_oss() -> PreTrainedModel:
    """gpt-oss: experts with biases and transposed weights, gamma multiplied in float32, sliding and full attention."""
    config = GptOssConfig(**SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    return randomized(GptOssForCausalLM, config)


def minimax_m2() -> PreTrainedModel:
    """MiniMax-M2: sigmoid routing with a correction bias, normalised weights, partial RoPE, no shared expert."""
    config = MiniMaxM2Config(**SMALL, head_dim=16, rotary_dim=8, num_local_experts=8, num_experts_per_tok=3)
    return randomized(MiniMaxM2ForCausalLM, config)


def mixtral() -> PreTrainedModel:
    """Mixtral: 4 experts, 2 chosen, weights normalised over the chosen ones."""
    return randomized(MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))


def olmoe() -> PreTrainedModel:
    """OLMoE: 8 experts, 3 chosen, weights not normalised."""
    return randomized(OlmoeForCausalLM, OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=3))


def qwen2_moe() -> PreTrainedModel:
    """Qwen2-MoE: a shared expert behind a sigmoid gate, weights not normalised."""
    config = Qwen2MoeConfig(
        **SMALL, moe_intermediate_size=32, shared_expert_intermediate_size=48, num_experts=8, num_experts_per_tok=2
    )
    return randomized(Qwen2MoeForCausalLM, config)


def qwen3_moe() -> PreTrainedModel:
    """Qwen3-MoE: 8 experts, 2 chosen, normalised weights, no shared expert."""
    return randomized(Qwen3MoeForCausalLM, _qwen3_moe_config())


def qwen3_moe_sparse() -> PreTrainedModel:
    """Qwen3-MoE with MoE in every second layer only: 4 layers, 2 of them MoE."""
    return randomized(Qwen3MoeForCausalLM, _qwen3_moe_config(num_hidden_layers=4, decoder_sparse_step=2))


def _qwen3_moe_config(**changes: Any) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **SMALL | changes,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )


def qwen3_next() -> PreTrainedModel:
    """Qwen3-Next: norms of 1 + w, a shared expert behind a sigmoid gate, linear and full attention."""
    config = Qwen3NextConfig(
        **SMALL,
        **_LINEAR_ATTENTION,
        head_dim=16,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
    )
    return randomized(Qwen3NextForCausalLM, config)


def qwen3_5_moe() -> PreTrainedModel:
    """Qwen3.5-MoE's text model: norms of 1 + w, a shared expert behind a sigmoid gate, linear and full attention."""
    config = Qwen3_5MoeTextConfig(
        **{key: size for key, size in SMALL.items() if key != "intermediate_size"},
        **_LINEAR_ATTENTION,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=3,
    )
    return randomized(Qwen3_5MoeForCausalLM, config)


def deepseek_v2() -> PreTrainedModel:
    """1 dense and 2 MoE layers: 2 shared and 8 routed experts, 3 chosen in 2 of 4 groups, scaling 2.5; complex YaRN."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0}
    config = DeepseekV2Config(
        **SMALL | {"num_hidden_layers": 3, "num_key_value_heads": 4},
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        n_shared_experts=2,
        n_routed_experts=8,
        num_experts_per_tok=3,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        rope_parameters=yarn | {"rope_theta": 10000.0, "original_max_position_embeddings": 64},
    )
    return randomized(DeepseekV2ForCausalLM, config)


_GRANITE: dict[str, Any] = {
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.0,
}


def granite_moe() -> PreTrainedModel:
    """2 MoE layers of 8 experts, 3 chosen; what they give is multiplied by 0.22 before the residual is added."""
    return randomized(GraniteMoeForCausalLM, GraniteMoeConfig(**SMALL | _GRANITE))


def granite_moe_shared() -> PreTrainedModel:
    """The same with a shared expert, which is multiplied by 0.22 too."""
    config = GraniteMoeSharedConfig(**SMALL | _GRANITE, shared_intermediate_size=40)
    return randomized(GraniteMoeSharedForCausalLM, config)


def llama4(top_k: int = 1) -> PreTrainedModel:
    """A MoE of 8 experts and a shared one in every second of 4 layers; complex rotary embedding, chunked attention.

    The router's weights multiply the experts' input, not their output.
    """
    config = Llama4TextConfig(
        **SMALL | {"num_hidden_layers": 4},
        head_dim=16,
        intermediate_size_mlp=80,
        interleave_moe_layer_step=2,
        num_local_experts=8,
        num_experts_per_tok=top_k,
        attention_chunk_size=16,
        pad_token_id=0,
    )
    return randomized(Llama4ForCausalLM, config)


def jamba() -> PreTrainedModel:
    """Mamba and attention by turns, a MoE of 8 experts, 2 chosen, after every second of 4 layers."""
    config = JambaConfig(
        **SMALL | {"num_hidden_layers": 4},
        num_experts=8,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=8,
    )
    return randomized(JambaForCausalLM, config)


def phimoe() -> PreTrainedModel:
    """Phi-3.5-MoE: 2 MoE layers of 8 experts, 2 chosen by sparsemixer; LayerNorm; longrope past 16 tokens."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0 + 0.05 * i for i in range(8)],
        "long_factor": [1.0 + 0.5 * i for i in range(8)],
        "short_mscale": 1.1,
        "long_mscale": 1.2,
    }
    config = PhimoeConfig(
        **SMALL,
        num_local_experts=8,
        num_experts_per_tok=2,
        attention_bias=True,
        lm_head_bias=True,
        rope_parameters=longrope,
    )
    return randomized(PhimoeForCausalLM, config)


def afmoe() -> PreTrainedModel:
    """Arcee's, 1 dense and 2 MoE layers of 8 experts: sigmoid routing, a shared expert; norms around each sublayer."""
    config = AfmoeConfig(
        **{**SMALL, "num_hidden_layers": 3},
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        head_dim=16,
    )
    return randomized(AfmoeForCausalLM, config)


def deepseek_v4() -> PreTrainedModel:
    """2 MoE layers of 8 experts, 3 chosen, by a table of tokens and by top-k; hyper-connections of 2 streams."""
    config = DeepseekV4Config(
        vocab_size=96,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=256,
        # The other kinds do not run in float16: Transformers keeps some of their layers in float32.
        layer_types=["sliding_attention", "sliding_attention"],
        partial_rotary_factor=0.5,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=8,
        mlp_layer_types=["hash_moe", "moe"],
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_shared_experts=1,
        hc_mult=2,
        hc_sinkhorn_iters=3,
    )
    model = randomized(DeepseekV4ForCausalLM, config)
    tokens = torch.arange(config.vocab_size)
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):  # token to experts; all zeros in a fresh model
            table.copy_((tokens[:, None] + torch.tensor([0, 3, 5])) % config.n_routed_experts)
    return model


def dbrx() -> PreTrainedModel:
    """2 MoE layers of 8 experts, 3 chosen, outside Transformers' experts interface; LayerNorm."""
    config = DbrxConfig(
        vocab_size=96,
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=256,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        ffn_config={"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 3},
    )
    return randomized(DbrxForCausalLM, config)


def contract_decoder() -> Source:
    """Outside Transformers, by the contract alone: 1 dense and 2 MoE layers; padded and absent rows with NaN."""
    return contract_decoder_source(ContractConfig())


def randomized(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, the same for the same seed.

    What a fresh model has all equal, such as norm weights and routing biases, is made uneven: a graph that took one
    layer's for another's, or left one out, would otherwise give the right numbers.
    """
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
                    # Biases less than weights: those of a router decide between scores that lie close together.
                    tensor.add_((0.05 if name.endswith("bias") else 0.1) * torch.randn_like(tensor))
    finally:
        torch.random.set_rng_state(state)
    return model
