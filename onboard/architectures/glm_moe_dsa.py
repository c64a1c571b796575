"""GLM-5, 5.1, 5.2 and 5.3: latent attention made sparse by indexers that layers share."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"glm_moe_dsa": "GlmMoeDsaForCausalLM"},
    tensors="""
    embed      model.embed_tokens.weight                             vocab_size, hidden_size
    norm       model.layers.{any_layer}.{input,post_attention}_layernorm.weight  hidden_size
    attention  model.layers.{any_layer}.self_attn.q_a_proj.weight    q_lora_rank, hidden_size
    norm       model.layers.{any_layer}.self_attn.q_a_layernorm.weight  q_lora_rank
    attention  model.layers.{any_layer}.self_attn.q_b_proj.weight    num_attention_heads * (qk_nope_head_dim + qk_rope_head_dim), q_lora_rank
    attention  model.layers.{any_layer}.self_attn.kv_a_proj_with_mqa.weight  kv_lora_rank + qk_rope_head_dim, hidden_size
    norm       model.layers.{any_layer}.self_attn.kv_a_layernorm.weight  kv_lora_rank
    attention  model.layers.{any_layer}.self_attn.kv_b_proj.weight   num_attention_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank
    attention  model.layers.{any_layer}.self_attn.o_proj.weight      hidden_size, num_attention_heads * v_head_dim
    indexer    model.layers.{any_layer}.self_attn.indexer.wq_b.weight  index_n_heads * index_head_dim, q_lora_rank  if layer >= num_hidden_layers or indexer_types[layer] in ("full", "F")
    indexer    model.layers.{any_layer}.self_attn.indexer.wk.weight  index_head_dim, hidden_size  if layer >= num_hidden_layers or indexer_types[layer] in ("full", "F")
    norm       model.layers.{any_layer}.self_attn.indexer.k_norm.weight  index_head_dim  if layer >= num_hidden_layers or indexer_types[layer] in ("full", "F")
    bias       model.layers.{any_layer}.self_attn.indexer.k_norm.bias  index_head_dim  if layer >= num_hidden_layers or indexer_types[layer] in ("full", "F")
    indexer    model.layers.{any_layer}.self_attn.indexer.weights_proj.weight  index_n_heads, hidden_size  if layer >= num_hidden_layers or indexer_types[layer] in ("full", "F")
    mlp        model.layers.{any_layer}.mlp.{gate,up}_proj.weight    intermediate_size, hidden_size  if layer < num_hidden_layers and mlp_layer_types[layer] == "dense"
    mlp        model.layers.{any_layer}.mlp.down_proj.weight         hidden_size, intermediate_size  if layer < num_hidden_layers and mlp_layer_types[layer] == "dense"
    router     model.layers.{any_layer}.mlp.gate.weight              n_routed_experts, hidden_size  if layer >= num_hidden_layers or mlp_layer_types[layer] == "sparse"
    bias       model.layers.{any_layer}.mlp.gate.e_score_correction_bias  n_routed_experts  if layer >= num_hidden_layers or mlp_layer_types[layer] == "sparse"
    expert     model.layers.{any_layer}.mlp.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size  if layer >= num_hidden_layers or mlp_layer_types[layer] == "sparse"
    expert     model.layers.{any_layer}.mlp.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size  if layer >= num_hidden_layers or mlp_layer_types[layer] == "sparse"
    shared_expert  model.layers.{any_layer}.mlp.shared_experts.{gate,up}_proj.weight  n_shared_experts * moe_intermediate_size, hidden_size  if layer >= num_hidden_layers or mlp_layer_types[layer] == "sparse"
    shared_expert  model.layers.{any_layer}.mlp.shared_experts.down_proj.weight  hidden_size, n_shared_experts * moe_intermediate_size  if layer >= num_hidden_layers or mlp_layer_types[layer] == "sparse"
    norm       model.norm.weight                                     hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    mtp        model.layers.{any_layer}.eh_proj.weight               hidden_size, 2 * hidden_size  if layer >= num_hidden_layers
    mtp        model.layers.{any_layer}.{enorm,hnorm,shared_head.norm}.weight  hidden_size  if layer >= num_hidden_layers
    """,
    also="""
    expert     model.layers.{any_layer}.mlp.experts.gate_up_proj     n_routed_experts, 2 * moe_intermediate_size, hidden_size
    expert     model.layers.{any_layer}.mlp.experts.down_proj        n_routed_experts, hidden_size, moe_intermediate_size
    mtp        model.layers.{any_layer}.{embed_tokens,shared_head.head}.weight  vocab_size, hidden_size
    bias       model.layers.{any_layer}.self_attn.q_a_proj.bias      q_lora_rank
    bias       model.layers.{any_layer}.self_attn.kv_a_proj_with_mqa.bias  kv_lora_rank + qk_rope_head_dim
    bias       model.layers.{any_layer}.self_attn.o_proj.bias        hidden_size
    buffer     model.layers.{any_layer}.self_attn.rotary_emb.inv_freq  qk_rope_head_dim // 2
    """,
    defaults={
        "first_k_dense_replace": "3",
        "mlp_layer_types": '["dense"] * first_k_dense_replace'
        ' + ["sparse"] * (num_hidden_layers - first_k_dense_replace)',
        # A layer without an indexer reads what the last one before it picked. GLM-5 and 5.1 say
        # nothing, and every layer has one.
        "index_topk_freq": "1",
        "index_skip_topk_offset": "2",
        "index_topk_pattern": "None",
        "indexer_types": 'index_topk_pattern or ["full"] * index_skip_topk_offset'
        ' + (["shared"] * (index_topk_freq - 1) + ["full"]) * num_hidden_layers',
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "n_routed_experts"},
    # nvidia/GLM-5.1-NVFP4, 5.2 and 5.3 quantize the routed experts and nothing else. GLM-5-NVFP4,
    # the first, also took the dense MLPs and the shared experts: the later choice is followed here.
    # No list names the routers: they were no nn.Linear to the quantizer. They stay by their role.
    quantize=(Role.EXPERT,),
    siblings=(("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # fp8_ds_mla: the latent in FP8 with a float32 scale per 128, the rotated key in bf16 (656); and
    # the indexer's key in FP8 with its scale (132) where the layer owns one.
    cache="kv_lora_rank + kv_lora_rank // 32 + 2 * qk_rope_head_dim"
    ' + (index_head_dim + index_head_dim // 32 if indexer_types[layer] in ("full", "F") else 0)',
    small={"num_key_value_heads": 4, "index_n_heads": 4, "index_head_dim": 128},
    engine=Engine(
        minimum="0.23.0",
        tool_call_parser="glm47",
        reasoning_parser="glm45",
        cpu="vLLM has no sparse attention on CPU",
    ),
    origin="transformers 5.24 GlmMoeDsaForCausalLM and its qwen2_moe conversion (experts); vLLM 0.32 "
    "deepseek_v2.py, models/deepseek_v32; published GLM-5.2: 743B without the MTP layer, which has "
    "791 tensors (an indexer, but neither embedding nor head)",
    traps=(
        "57 of GLM-5.2's 78 layers have no indexer weights: absent is right there.",
        "A checkpoint without layer 78, the MTP layer, loads silently and drafts garbage; "
        "transformers never loads it.",
        "head_dim in the config is 64 (5, 5.1) or 192 (5.2, 5.3), and neither is the width of a "
        "head, qk_nope_head_dim + qk_rope_head_dim.",
        "rope_theta is nested in rope_parameters.",
        "SGLang forces the MTP draft to bf16.",
    ),
)
