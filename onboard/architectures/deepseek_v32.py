"""DeepSeek-V3.2: DeepSeek-V3 with sparse attention, whose indexer every layer owns."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={"deepseek_v32": "DeepseekV32ForCausalLM"},
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
    indexer    model.layers.{any_layer}.self_attn.indexer.wq_b.weight  index_n_heads * index_head_dim, q_lora_rank
    indexer    model.layers.{any_layer}.self_attn.indexer.wk.weight  index_head_dim, hidden_size
    norm       model.layers.{any_layer}.self_attn.indexer.k_norm.weight  index_head_dim
    bias       model.layers.{any_layer}.self_attn.indexer.k_norm.bias  index_head_dim
    indexer    model.layers.{any_layer}.self_attn.indexer.weights_proj.weight  index_n_heads, hidden_size
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
        "first_k_dense_replace": "0",
        "num_nextn_predict_layers": "0",
        "tie_word_embeddings": "False",
    },
    ranges={"expert": "n_routed_experts"},
    # nvidia/DeepSeek-V3.2-NVFP4 quantizes o_proj and every MLP and expert, and keeps the other
    # projections of the attention, the indexers, lm_head and the MTP layer. Its list does not name
    # the routers: they were no nn.Linear to the quantizer. They stay here because of their role.
    quantize=(Role.ATTENTION, Role.MLP, Role.EXPERT, Role.SHARED_EXPERT),
    keep=("*.q_a_proj.*", "*.q_b_proj.*", "*.kv_a_proj_with_mqa.*", "*.kv_b_proj.*"),
    siblings=(("q_a_proj", "kv_a_proj_with_mqa"), ("gate_proj", "up_proj")),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # fp8_ds_mla: the latent in FP8 with a float32 scale per 128, the rotated key in bf16 (656); and
    # the indexer's key in FP8 with its scale (132).
    cache="kv_lora_rank + kv_lora_rank // 32 + 2 * qk_rope_head_dim"
    " + index_head_dim + index_head_dim // 32",
    small={"num_key_value_heads": 4, "index_n_heads": 4, "index_head_dim": 128},
    engine=Engine(
        minimum="0.18.0",
        tool_call_parser="deepseek_v32",
        reasoning_parser="deepseek_v3",
        prompt="engine",
        cpu="vLLM has no sparse attention on CPU",
    ),
    origin="transformers 5.24 DeepseekV32ForCausalLM and its qwen2_moe conversion (experts); vLLM "
    "0.32 models/deepseek_v32, deepseek_mtp.py; published: 685B with the MTP layer",
    traps=(
        "The published weights are block FP8 (128x128, weight_scale_inv).",
        "There is no Jinja template: serve with --tokenizer-mode deepseek_v32.",
        "Two caches: the latent one and the indexer's.",
        "transformers drops layer 61, the MTP layer, without a message.",
    ),
)
