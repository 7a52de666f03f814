"""Transformers models that only tests need; as a source: ``tests.models.families:NAME``."""

from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from moetrt.models import SMALL, randomized


def deepseek_v3() -> PreTrainedModel:
    """The smallest: 1 dense and 1 MoE layer; 1 shared and 8 routed experts of which 3 are chosen in 2 of 4 groups."""
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
        **SMALL | latent | routing,
        moe_intermediate_size=32,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=2.5,
    )
    return randomized(DeepseekV3ForCausalLM, config)


def llama() -> PreTrainedModel:
    """A model without MoE."""
    return randomized(LlamaForCausalLM, LlamaConfig(**SMALL))
