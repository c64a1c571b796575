"""GLM-4.5, 4.5-Air, 4.6 and 4.7: grouped-query attention and DeepSeek-V3's experts."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"glm4_moe": "Glm4MoeForCausalLM"},
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{any_layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{any_layer}.self_attn.q_proj.weight      num_attention_heads * head_dim, hidden_size
    attention  model.layers.{any_layer}.self_attn.{k,v}_proj.weight  num_key_value_heads * head_dim, hidden_size
    attention  model.layers.{any_layer}.self_attn.o_proj.weight      hidden_size, num_attention_heads * head_dim
    bias       model.layers.{any_layer}.self_attn.q_proj.bias        num_attention_heads * head_dim  if attention_bias
    bias       model.layers.{any_layer}.self_attn.{k,v}_proj.bias    num_key_value_heads * head_dim  if attention_bias
    norm       model.layers.{any_layer}.self_attn.{q,k}_norm.weight  head_dim  if use_qk_norm
    mlp        model.layers.{any_layer}.mlp.{gate,up}_proj.weight    intermediate_size, hidden_size  if layer < first_k_dense_replace
    mlp        model.layers.{any_layer}.mlp.down_proj.weight         hidden_size, intermediate_size  if layer < first_k_dense_replace
    router     model.layers.{any_layer}.mlp.gate.weight              n_routed_experts, hidden_size  if layer >= first_k_dense_replace
    bias       model.layers.{any_layer}.mlp.gate.e_score_correction_bias  n_routed_experts  if layer >= first_k_dense_replace
    expert     model.layers.{any_layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if layer >= first_k_dense_replace
    expert     model.layers.{any_layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if layer >= first_k_dense_replace
    shared_expert  model.layers.{any_layer}.mlp.shared_experts.{gate,up}_proj.weight  n_shared_experts * moe_intermediate_size, hidden_size  if layer >= first_k_dense_replace
    shared_expert  model.layers.{any_layer}.mlp.shared_experts.down_proj.weight  hidden_size, n_shared_experts * moe_intermediate_size  if layer >= first_k_dense_replace
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        model.layers.{any_layer}.eh_proj.weight               hidden_size, 2 * hidden_size  if layer >= num_hidden_layers
    mtp        model.layers.{any_layer}.{enorm,hnorm,shared_head.norm}.weight  hidden_size  if layer >= num_hidden_layers
    """,
    # GLM-4.5's MTP layer has its own embedding and head, 4.6's and later have not, and no key of
    # the config tells.
    also="""
    mtp        model.layers.{any_layer}.{embed_tokens,shared_head.head}.weight  vocab_size, hidden_size
    expert     model.layers.{any_layer}.mlp.experts.gate_up_proj     n_routed_experts, 2 * moe_intermediate_size, hidden_size
    expert     model.layers.{any_layer}.mlp.experts.down_proj        n_routed_experts, hidden_size, moe_intermediate_size
    buffer     model.layers.{any_layer}.self_attn.rotary_emb.inv_freq  head_dim // 4
    """,
    defaults={
        "head_dim": "hidden_size // num_attention_heads",
        "attention_bias": "False",
        "use_qk_norm": "False",
        "first_k_dense_replace": "1",
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "n_routed_experts"},
    # No published list was read for this family. What every list of the other GLM models keeps
    # stays: the attention and, by their roles, routers, lm_head and the MTP layer.
    quantize=(Role.MLP, Role.EXPERT, Role.SHARED_EXPERT),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    engine=Engine(minimum="0.11.0", tool_call_parser="glm47", reasoning_parser="glm45"),
    origin="transformers 5.24 Glm4MoeForCausalLM and its qwen2_moe conversion (experts); MTP: vLLM "
    "0.32 glm4_moe_mtp.py; published: GLM-4.5 355B, 4.5-Air 106B",
    traps=(
        "transformers drops layer 92 (4.5-Air: 46), the MTP layer, without a message.",
        "GLM-4.5 and 4.6 call tools in glm45's format; in vLLM 0.32 both names are one parser.",
        "The MTP head may lack embed_tokens and shared_head.head: the engine shares the model's.",
    ),
)
