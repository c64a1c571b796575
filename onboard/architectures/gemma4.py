"""Gemma 4: sliding and wide full-attention layers that may share keys with values, experts beside a
dense MLP (26B-A4B), per-layer embeddings and audio (E2B, E4B)."""

from onboard.architectures import Architecture, Engine, Fused, Role

ARCHITECTURE = Architecture(
    model_types={
        "gemma4": "Gemma4ForConditionalGeneration",
        "gemma4_text": "Gemma4ForCausalLM",
    },
    roots={"gemma4": "model.language_model", "gemma4_text": "model"},
    text_config="text_config",
    # With attention_k_eq_v, full layers have no v_proj: values are the keys. The last
    # num_kv_shared_layers layers have neither and read an earlier layer's cache.
    tensors="""
    embed      {root}.embed_tokens.weight                            vocab_size, hidden_size
    embed      {root}.embed_tokens_per_layer.weight                  vocab_size_per_layer_input, num_hidden_layers * hidden_size_per_layer_input  if hidden_size_per_layer_input
    embed      {root}.per_layer_model_projection.weight              num_hidden_layers * hidden_size_per_layer_input, hidden_size  if hidden_size_per_layer_input
    norm       {root}.per_layer_projection_norm.weight               hidden_size_per_layer_input  if hidden_size_per_layer_input
    norm       {root}.layers.{layer}.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight  hidden_size
    norm       {root}.layers.{layer}.layer_scalar                    1
    attention  {root}.layers.{layer}.self_attn.q_proj.weight         num_attention_heads * (global_head_dim if layer_types[layer] == "full_attention" else head_dim), hidden_size
    attention  {root}.layers.{layer}.self_attn.k_proj.weight         num_key_value_heads * head_dim, hidden_size  if layer < own_cache and layer_types[layer] != "full_attention"
    attention  {root}.layers.{layer}.self_attn.k_proj.weight         global_key_value_heads * global_head_dim, hidden_size  if layer < own_cache and layer_types[layer] == "full_attention"
    attention  {root}.layers.{layer}.self_attn.v_proj.weight         num_key_value_heads * head_dim, hidden_size  if layer < own_cache and layer_types[layer] != "full_attention"
    attention  {root}.layers.{layer}.self_attn.v_proj.weight         global_key_value_heads * global_head_dim, hidden_size  if layer < own_cache and layer_types[layer] == "full_attention" and not attention_k_eq_v
    attention  {root}.layers.{layer}.self_attn.o_proj.weight         hidden_size, num_attention_heads * (global_head_dim if layer_types[layer] == "full_attention" else head_dim)
    norm       {root}.layers.{layer}.self_attn.q_norm.weight         global_head_dim if layer_types[layer] == "full_attention" else head_dim
    norm       {root}.layers.{layer}.self_attn.k_norm.weight         global_head_dim if layer_types[layer] == "full_attention" else head_dim  if layer < own_cache
    mlp        {root}.layers.{layer}.mlp.{gate,up}_proj.weight       intermediate_size * (2 if use_double_wide_mlp and layer >= own_cache else 1), hidden_size
    mlp        {root}.layers.{layer}.mlp.down_proj.weight            hidden_size, intermediate_size * (2 if use_double_wide_mlp and layer >= own_cache else 1)
    embed      {root}.layers.{layer}.per_layer_input_gate.weight     hidden_size_per_layer_input, hidden_size  if hidden_size_per_layer_input
    embed      {root}.layers.{layer}.per_layer_projection.weight     hidden_size, hidden_size_per_layer_input  if hidden_size_per_layer_input
    norm       {root}.layers.{layer}.post_per_layer_input_norm.weight  hidden_size  if hidden_size_per_layer_input
    router     {root}.layers.{layer}.router.proj.weight              num_experts, hidden_size  if enable_moe_block
    router     {root}.layers.{layer}.router.scale                    hidden_size  if enable_moe_block
    router     {root}.layers.{layer}.router.per_expert_scale         num_experts  if enable_moe_block
    expert     {root}.layers.{layer}.experts.gate_up_proj            num_experts, 2 * moe_intermediate_size, hidden_size  if enable_moe_block
    expert     {root}.layers.{layer}.experts.down_proj               num_experts, hidden_size, moe_intermediate_size  if enable_moe_block
    norm       {root}.layers.{layer}.{post_feedforward_layernorm_1,post_feedforward_layernorm_2,pre_feedforward_layernorm_2}.weight  hidden_size  if enable_moe_block
    norm       {root}.norm.weight                                    hidden_size
    head       lm_head.weight                                        vocab_size, hidden_size  if not tie_word_embeddings
    vision     model.embed_vision.embedding_projection.weight        hidden_size, vision_config.hidden_size  if vision_config
    vision     model.vision_tower.patch_embedder.position_embedding_table  2, vision_config.position_embedding_size, vision_config.hidden_size  if vision_config
    vision     model.vision_tower.patch_embedder.input_proj.weight   vision_config.hidden_size, 3 * vision_config.patch_size ** 2  if vision_config
    vision     model.vision_tower.std_{bias,scale}                   vision_config.hidden_size  if getattr(vision_config, "standardize", False)
    vision     model.vision_tower.encoder.layers.{block}.{input,post_attention,pre_feedforward,post_feedforward}_layernorm.weight  vision_config.hidden_size
    vision     model.vision_tower.encoder.layers.{block}.self_attn.{q,k,v}_proj.linear.weight  vision_config.num_attention_heads * vision_config.head_dim, vision_config.hidden_size
    vision     model.vision_tower.encoder.layers.{block}.self_attn.o_proj.linear.weight  vision_config.hidden_size, vision_config.num_attention_heads * vision_config.head_dim
    vision     model.vision_tower.encoder.layers.{block}.self_attn.{q,k}_norm.weight  vision_config.head_dim
    vision     model.vision_tower.encoder.layers.{block}.mlp.{gate,up}_proj.linear.weight  vision_config.intermediate_size, vision_config.hidden_size
    vision     model.vision_tower.encoder.layers.{block}.mlp.down_proj.linear.weight  vision_config.hidden_size, vision_config.intermediate_size
    vision     model.vision_tower.encoder.layers.{clipped}.self_attn.{q,k,v,o}_proj.{input_min,input_max,output_min,output_max}  *()
    vision     model.vision_tower.encoder.layers.{clipped}.mlp.{gate,up,down}_proj.{input_min,input_max,output_min,output_max}  *()
    vision     model.embed_audio.embedding_projection.weight         hidden_size, audio_config.output_proj_dims  if audio_config
    vision     model.audio_tower.subsample_conv_projection.layer0.conv.weight  audio_config.subsampling_conv_channels[0], 1, 3, 3  if audio_config
    vision     model.audio_tower.subsample_conv_projection.layer0.norm.weight  audio_config.subsampling_conv_channels[0]  if audio_config
    vision     model.audio_tower.subsample_conv_projection.layer1.conv.weight  audio_config.subsampling_conv_channels[1], audio_config.subsampling_conv_channels[0], 3, 3  if audio_config
    vision     model.audio_tower.subsample_conv_projection.layer1.norm.weight  audio_config.subsampling_conv_channels[1]  if audio_config
    vision     model.audio_tower.subsample_conv_projection.input_proj_linear.weight  audio_config.hidden_size, 32 * audio_config.subsampling_conv_channels[1]  if audio_config
    vision     model.audio_tower.output_proj.weight                  audio_config.output_proj_dims, audio_config.hidden_size  if audio_config
    vision     model.audio_tower.output_proj.bias                    audio_config.output_proj_dims  if audio_config
    vision     model.audio_tower.layers.{audio}.{norm_pre_attn,norm_post_attn,norm_out}.weight  audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.feed_forward{1,2}.ffw_layer_1.linear.weight  4 * audio_config.hidden_size, audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.feed_forward{1,2}.ffw_layer_2.linear.weight  audio_config.hidden_size, 4 * audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.feed_forward{1,2}.{pre,post}_layer_norm.weight  audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.self_attn.per_dim_scale  audio_config.hidden_size // audio_config.num_attention_heads
    vision     model.audio_tower.layers.{audio}.self_attn.{q_proj,k_proj,v_proj,post}.linear.weight  audio_config.hidden_size, audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.self_attn.relative_k_proj.weight  audio_config.hidden_size, audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.lconv1d.linear_start.linear.weight  2 * audio_config.hidden_size, audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.lconv1d.linear_end.linear.weight  audio_config.hidden_size, audio_config.hidden_size
    vision     model.audio_tower.layers.{audio}.lconv1d.depthwise_conv1d.weight  audio_config.hidden_size, 1, audio_config.conv_kernel_size
    vision     model.audio_tower.layers.{audio}.lconv1d.{pre_layer_norm,conv_norm}.weight  audio_config.hidden_size
    vision     model.audio_tower.layers.{clipped_audio}.feed_forward{1,2}.ffw_layer_{1,2}.{input_min,input_max,output_min,output_max}  *()
    vision     model.audio_tower.layers.{clipped_audio}.self_attn.{q_proj,k_proj,v_proj,post}.{input_min,input_max,output_min,output_max}  *()
    vision     model.audio_tower.layers.{clipped_audio}.lconv1d.linear_{start,end}.{input_min,input_max,output_min,output_max}  *()
    """,
    # One matrix per expert: the NVFP4 release.
    also="""
    expert     {root}.layers.{layer}.experts.{expert}.{gate,up}_proj.weight  moe_intermediate_size, hidden_size
    expert     {root}.layers.{layer}.experts.{expert}.down_proj.weight  hidden_size, moe_intermediate_size
    """,
    defaults={
        "global_head_dim": "512",
        "num_global_key_value_heads": "num_key_value_heads",
        "attention_k_eq_v": "False",
        "global_key_value_heads": "num_global_key_value_heads if attention_k_eq_v"
        " else num_key_value_heads",
        "num_kv_shared_layers": "0",
        "own_cache": "num_hidden_layers - num_kv_shared_layers",
        "use_double_wide_mlp": "False",
        "hidden_size_per_layer_input": "0",
        "enable_moe_block": "False",
        "num_experts": "0",
        "tie_word_embeddings": "True",
        "vision_config": "None",
        "audio_config": "None",
    },
    ranges={
        "expert": "num_experts",
        "block": 'getattr(vision_config, "num_hidden_layers", 0)',
        "clipped": 'getattr(vision_config, "use_clipped_linears", False)'
        ' and getattr(vision_config, "num_hidden_layers", 0)',
        "audio": 'getattr(audio_config, "num_hidden_layers", 0)',
        "clipped_audio": 'getattr(audio_config, "use_clipped_linears", False)'
        ' and getattr(audio_config, "num_hidden_layers", 0)',
    },
    experts_per_token="top_k_experts or 0",
    mtp_layers="0",
    # nvidia/Gemma-4-31B-IT-NVFP4 quantizes the dense mlp and keeps self_attn, vision and lm_head;
    # 26B-A4B quantizes the routed experts and keeps the mlp beside them too, and the router. We
    # quantize that mlp: one name cannot be kept in one model and quantized in the other; pass
    # --set 'adapt.keep=["*.mlp.*"]' to follow the list.
    quantize=(Role.MLP, Role.EXPERT),
    fused_experts={
        "gate_up_proj": Fused(("gate_proj", "up_proj")),
        "down_proj": Fused(("down_proj",)),
    },
    # Per token in every layer; sliding layers stop growing at sliding_window. Engines store keys
    # and values apart even where they are equal.
    cache="0 if layer >= own_cache else 2 * global_key_value_heads * global_head_dim"
    ' if layer_types[layer] == "full_attention" else 2 * num_key_value_heads * head_dim',
    small={
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "top_k_experts": 2,
        "num_kv_shared_layers": 0,
        "vision_config.num_hidden_layers": 2,
        "vision_config.hidden_size": 64,
        "vision_config.intermediate_size": 128,
        "vision_config.num_attention_heads": 2,
        "vision_config.num_key_value_heads": 2,
        "vision_config.head_dim": 32,
        "vision_config.position_embedding_size": 64,
        "audio_config.num_hidden_layers": 2,
        "audio_config.hidden_size": 64,
        "audio_config.num_attention_heads": 2,
        "audio_config.output_proj_dims": 64,
    },
    engine=Engine(
        minimum="0.19.0",
        tool_call_parser="gemma4",
        reasoning_parser="gemma4",
        cpu="its class is multimodal and needs torchvision, which the CPU engine lacks",
    ),
    origin="transformers 5.24 Gemma4ForConditionalGeneration; vLLM 0.32 gemma4_mm.py; "
    "NVFP4: nvidia/Gemma-4-31B-IT-NVFP4, nvidia/Gemma-4-26B-A4B-NVFP4",
    traps=(
        "Full layers have no v_proj where attention_k_eq_v: a check for complete q, k, v misleads.",
        "An expert is 704 wide, 44 blocks of 16: eight tensor-parallel ranks would split a block.",
        "Logits are soft-capped (final_logit_softcapping) after the head.",
        "layer_scalar is a buffer in transformers but differs per layer: copy it.",
    ),
)
