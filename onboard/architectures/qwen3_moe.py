"""Qwen3 mixture of experts: published one tensor per expert, saved by transformers 5 as one 3-D
tensor per layer and projection (gate and up stacked along the outputs)."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{layer}.self_attn.q_proj.weight          num_attention_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.{k,v}_proj.weight      num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{layer}.self_attn.o_proj.weight          hidden_size, num_attention_heads * head_dim
    norm       model.layers.{layer}.self_attn.{q,k}_norm.weight      head_dim
    router     model.layers.{layer}.mlp.gate.weight                  num_experts, hidden_size  if layer not in mlp_only_layers
    expert     model.layers.{layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if layer not in mlp_only_layers
    expert     model.layers.{layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if layer not in mlp_only_layers
    mlp        model.layers.{layer}.mlp.{gate,up}_proj.weight        intermediate_size, hidden_size  if layer in mlp_only_layers
    mlp        model.layers.{layer}.mlp.down_proj.weight             hidden_size, intermediate_size  if layer in mlp_only_layers
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    """,
    also="""
    expert     model.layers.{layer}.mlp.experts.gate_up_proj         num_experts, 2 * moe_intermediate_size, hidden_size
    expert     model.layers.{layer}.mlp.experts.down_proj            num_experts, hidden_size, moe_intermediate_size
    bias       model.layers.{layer}.self_attn.{q,k,v,o}_proj.bias    0
    """,
    defaults={
        "num_experts": "num_local_experts",  # as transformers 5 saves it
        "head_dim": "hidden_size // num_attention_heads",
        "mlp_only_layers": "()",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "num_experts"},
    quantize=(Role.ATTENTION, Role.MLP, Role.EXPERT),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    engine=Engine(minimum="0.8.4", tool_call_parser="hermes", reasoning_parser="qwen3"),
    origin="transformers 5.24 Qwen3MoeForCausalLM; NVFP4: nvidia/Qwen3-235B-A22B-NVFP4 keeps gates",
)
