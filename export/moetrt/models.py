"""The demonstration's model: DeepSeek-V3's architecture in Transformers' own classes, small, with random weights."""

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PreTrainedConfig, PreTrainedModel


def deepseek_v3() -> PreTrainedModel:
    """A DeepSeek-V3 of 1 dense and 3 MoE layers: shared expert, grouped sigmoid routing, routed scaling 2.5; float32.

    As a source: ``moetrt.models:deepseek_v3``.
    """
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


def randomized(model_class: type[PreTrainedModel], config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A model with random weights, the same for the same seed.

    Norm weights and routing biases, which a fresh model has all equal, are made uneven: a graph that took one layer's
    for another's would otherwise give the right numbers.
    """
    state = torch.random.get_rng_state()
    try:
        torch.manual_seed(seed)
        model = model_class(config).eval()
        with torch.no_grad():
            for name, tensor in model.state_dict(keep_vars=True).items():
                if name.endswith("norm.weight"):
                    tensor.add_(0.1 * torch.randn_like(tensor))
                elif name.endswith(("correction_bias", "router.bias")):
                    tensor.add_(0.05 * torch.randn_like(tensor))
    finally:
        torch.random.set_rng_state(state)
    return model
