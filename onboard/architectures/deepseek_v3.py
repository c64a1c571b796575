"""DeepSeek-V3, R1 and V3.1: latent attention (MLA) and many small experts."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"deepseek_v3": "DeepseekV3ForCausalLM"},
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{any_layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{any_layer}.self_attn.q_proj.weight      num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), hidden_size  if not q_lora_rank
    attention  model.layers.{any_layer}.self_attn.q_a_proj.weight    q_lora_rank, hidden_size  if q_lora_rank
    norm       model.layers.{any_layer}.self_attn.q_a_layernorm.weight  q_lora_rank  if q_lora_rank
    attention  model.layers.{any_layer}.self_attn.q_b_proj.weight    num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank  if q_lora_rank
    attention  model.layers.{any_layer}.self_attn.kv_a_proj_with_mqa.weight  kv_lora_rank + qk_rope_head_dim, hidden_size
    norm       model.layers.{any_layer}.self_attn.kv_a_layernorm.weight  kv_lora_rank
    attention  model.layers.{any_layer}.self_attn.kv_b_proj.weight   num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank
    attention  model.layers.{any_layer}.self_attn.o_proj.weight      hidden_size, num_attention_heads * v_head_dim
    mlp        model.layers.{any_layer}.mlp.{gate,up}_proj.weight    intermediate_size, hidden_size  if layer < first_k_dense_replace or layer % moe_layer_freq
    mlp        model.layers.{any_layer}.mlp.down_proj.weight         hidden_size, intermediate_size  if layer < first_k_dense_replace or layer % moe_layer_freq
    router     model.layers.{any_layer}.mlp.gate.weight              n_routed_experts, hidden_size  if layer >= first_k_dense_replace and layer % moe_layer_freq == 0
    bias       model.layers.{any_layer}.mlp.gate.e_score_correction_bias  n_routed_experts  if layer >= first_k_dense_replace and layer % moe_layer_freq == 0
    expert     model.layers.{any_layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if layer >= first_k_dense_replace and layer % moe_layer_freq == 0
    expert     model.layers.{any_layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if layer >= first_k_dense_replace and layer % moe_layer_freq == 0
    shared_expert  model.layers.{any_layer}.mlp.shared_experts.{gate,up}_proj.weight  n_shared_experts * moe_intermediate_size, hidden_size  if n_shared_experts and layer >= first_k_dense_replace and layer % moe_layer_freq == 0
    shared_expert  model.layers.{any_layer}.mlp.shared_experts.down_proj.weight  hidden_size, n_shared_experts * moe_intermediate_size  if n_shared_experts and layer >= first_k_dense_replace and layer % moe_layer_freq == 0
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        model.layers.{any_layer}.eh_proj.weight               hidden_size, 2 * hidden_size  if layer >= num_hidden_layers
    mtp        model.layers.{any_layer}.{enorm,hnorm,shared_head.norm}.weight  hidden_size  if layer >= num_hidden_layers
    mtp        model.layers.{any_layer}.{embed_tokens,shared_head.head}.weight  vocab_size, hidden_size  if layer >= num_hidden_layers
    """,
    also="""
    expert     model.layers.{any_layer}.mlp.experts.gate_up_proj     n_routed_experts, 2 * moe_intermediate_size, hidden_size
    expert     model.layers.{any_layer}.mlp.experts.down_proj        n_routed_experts, hidden_size, moe_intermediate_size
    bias       model.layers.{any_layer}.self_attn.q_a_proj.bias      q_lora_rank
    bias       model.layers.{any_layer}.self_attn.kv_a_proj_with_mqa.bias  kv_lora_rank + qk_rope_head_dim
    bias       model.layers.{any_layer}.self_attn.o_proj.bias        hidden_size
    buffer     model.layers.{any_layer}.self_attn.rotary_emb.inv_freq  qk_rope_head_dim // 2
    """,
    defaults={
        "q_lora_rank": "None",
        "first_k_dense_replace": "0",
        "moe_layer_freq": "1",
        "n_shared_experts": "0",
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "n_routed_experts"},
    # nvidia/DeepSeek-V3.1-NVFP4 quantizes o_proj and every MLP and expert, and keeps the other
    # projections of the attention, lm_head and the MTP layer. Its list does not name the routers:
    # they were no nn.Linear to the quantizer. They stay here because of their role.
    quantize=(Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT),
    keep=("*.q_proj.*", "*.q_a_proj.*", "*.q_b_proj.*", "*.kv_a_proj_with_mqa.*", "*.kv_b_proj.*"),
    siblings=(("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # One latent vector and one rotated key for all heads; no scales per token in plain FP8.
    cache="kv_lora_rank + qk_rope_head_dim",
    small={"num_key_value_heads": 4},
    engine=Engine(
        minimum="0.12.0", tool_call_parser="deepseek_v31", reasoning_parser="deepseek_v3"
    ),
    origin="transformers 5.24 DeepseekV3ForCausalLM and its qwen2_moe conversion (experts); vLLM "
    "0.32 deepseek_v2.py, deepseek_mtp.py; published: 671B, and 685B with the MTP layer, whose "
    "14B include its own copies of the embedding and the head",
    traps=(
        "The published weights are block FP8 (128x128, weight_scale_inv).",
        "transformers drops layer 61, the MTP layer, without a message.",
        "Parsers go by the release, not by the config: V3-0324 and R1 need deepseek_v3 for tool "
        "calls, R1 needs deepseek_r1 for reasoning.",
    ),
)
