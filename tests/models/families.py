"""Tiny random Transformers models, one factory a family, used as sources by tests: ``tests.models.families:NAME``."""

from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from moetrt.models import randomized

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def deepseek_v3() -> PreTrainedModel:
    """1 dense and 1 MoE layer; 1 shared and 8 routed experts of which 3 are chosen in 2 of 4 groups."""
    latent = {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_key_value_heads": 4,
    }
    routing = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}
    config = DeepseekV3Config(
        **{**_SMALL, **latent, **routing},
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
    )
    return randomized(DeepseekV3ForCausalLM, config)


def qwen3_moe() -> PreTrainedModel:
    """2 MoE layers of 8 experts, 2 chosen, no shared expert."""
    config = Qwen3MoeConfig(
        **_SMALL, head_dim=16, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True
    )
    return randomized(Qwen3MoeForCausalLM, config)


def qwen2_moe() -> PreTrainedModel:
    """2 MoE layers of 8 experts, 2 chosen, and a shared expert behind a sigmoid gate."""
    config = Qwen2MoeConfig(
        **_SMALL,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        num_experts=8,
        num_experts_per_tok=2,
    )
    return randomized(Qwen2MoeForCausalLM, config)


def mixtral() -> PreTrainedModel:
    """2 MoE layers of 4 experts, 2 chosen."""
    return randomized(MixtralForCausalLM, MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2))


def olmoe() -> PreTrainedModel:
    """2 MoE layers of 8 experts, 3 chosen."""
    return randomized(OlmoeForCausalLM, OlmoeConfig(**_SMALL, num_experts=8, num_experts_per_tok=3))


def glm4_moe() -> PreTrainedModel:
    """1 dense and 1 MoE layer; 1 shared and 8 routed experts, 2 chosen."""
    config = Glm4MoeConfig(
        **_SMALL,
        head_dim=16,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
    )
    return randomized(Glm4MoeForCausalLM, config)


def gpt_oss() -> PreTrainedModel:
    """2 MoE layers of 4 experts with biases and transposed weights, 2 chosen; sliding and full attention."""
    config = GptOssConfig(**_SMALL, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    return randomized(GptOssForCausalLM, config)


def llama() -> PreTrainedModel:
    """A model without MoE."""
    return randomized(LlamaForCausalLM, LlamaConfig(**_SMALL))
