"""Qwen3 mixture of experts: published one tensor per expert, saved by transformers 5 as one 3-D
tensor per layer and projection (gate and up stacked along the rows)."""

from onboard.architectures import Architecture, Role

ARCHITECTURE = Architecture(
    model_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    roles={
        Role.EMBED: r"model\.embed_tokens\.weight",
        Role.HEAD: r"lm_head\.weight",
        Role.NORM: r"model\.norm\.weight"
        r"|model\.layers\.\d+\.(input|post_attention)_layernorm\.weight"
        r"|model\.layers\.\d+\.self_attn\.[qk]_norm\.weight",
        Role.ATTENTION: r"model\.layers\.\d+\.self_attn\.[qkvo]_proj\.weight",
        Role.ROUTER: r"model\.layers\.\d+\.mlp\.gate\.weight",
        Role.EXPERT: r"model\.layers\.\d+\.mlp\.experts\.\d+\.(gate|up|down)_proj\.weight"
        r"|model\.layers\.\d+\.mlp\.experts\.(gate_up|down)_proj",
        Role.MLP: r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj\.weight",  # mlp_only_layers
        Role.BIAS: r"model\.layers\.\d+\.self_attn\.[qkvo]_proj\.bias",
    },
    fused_experts={"gate_up_proj": "[experts, 2 * out, in]", "down_proj": "[experts, out, in]"},
)
