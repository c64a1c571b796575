"""Dense decoders that publish their weights under Llama's tensor names."""

from onboard.architectures import Architecture, Role

ARCHITECTURE = Architecture(
    model_types={
        "llama": "LlamaForCausalLM",
        "ministral": "MinistralForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "seed_oss": "SeedOssForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    },
    roles={
        Role.EMBED: r"model\.embed_tokens\.weight",
        Role.HEAD: r"lm_head\.weight",
        Role.NORM: r"model\.norm\.weight"
        r"|model\.layers\.\d+\.(input|post_attention)_layernorm\.weight"
        r"|model\.layers\.\d+\.self_attn\.[qk]_norm\.weight",
        Role.ATTENTION: r"model\.layers\.\d+\.self_attn\.[qkvo]_proj\.weight",
        Role.MLP: r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj\.weight",
        Role.BIAS: r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.bias",
        Role.BUFFER: r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    },
)
